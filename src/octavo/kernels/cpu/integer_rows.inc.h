// Activations as integers: each row by a scale of its own. Included inside namespace octavo::OCTAVO_LEVEL.
//
// x is about scale * q, scale = max|x| / 127, q rounded to the nearest integer, ties to even. A row that is not finite
// gets a scale of NaN, so that it spoils its own results and no others.

// Rows [T, K] ready for products.
struct IntegerRows {
  std::int8_t* left;   // left tiles [row tiles][num_k][16][64]; rows and k that are not there: rows anything, k zero
  float* scales;       // [T]
  std::int32_t* sums;  // [T, groups] of q, in the groups of the weight that they meet
};

static inline std::size_t integer_rows_bytes(std::int64_t rows, std::int64_t size, std::int64_t groups) {
  const std::int64_t left = ceil_div(rows, 16) * num_k_tiles(size) * kTileBytes;
  return static_cast<std::size_t>(left + ceil_div(rows * (groups + 1) * 4, 64) * 64);
}

static inline IntegerRows place_integer_rows(void* memory, std::int64_t rows, std::int64_t size) {
  std::int8_t* left = static_cast<std::int8_t*>(memory);
  float* scales = reinterpret_cast<float*>(left + ceil_div(rows, 16) * num_k_tiles(size) * kTileBytes);
  return {left, scales, reinterpret_cast<std::int32_t*>(scales + rows)};
}

static inline std::int32_t sum_of_integers(i32x16 value) {
#if defined(OCTAVO_HAS_AVX512_BF16)
  return _mm512_reduce_add_epi32((__m512i)value);
#else
  std::int32_t sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += value[lane];
  return sum;
#endif
}

// As integers, magnitudes of floats are in their order; NaN is the last.
static inline u16x16 larger_magnitudes(u16x16 largest, u16x16 bits) {
  bits &= 0x7fff;
#if defined(OCTAVO_HAS_AVX512_BF16)
  return bits > largest ? bits : largest;
#else
  return select(bits > largest, bits, largest);
#endif
}

static inline float largest_magnitude(const bf16* x, std::int64_t size) {
  const std::int64_t num_whole = size / 16 * 16;
  u16x16 largest = {}, bits = {};
  for (std::int64_t i = 0; i < num_whole; i += 16) {
    bits = load<u16x16>(x + i);
    largest = larger_magnitudes(largest, bits);
  }
  bits = u16x16{};
  __builtin_memcpy(&bits, x + num_whole, static_cast<std::size_t>(size - num_whole) * sizeof(bf16));
  largest = larger_magnitudes(largest, bits);
  bf16 most = 0;
  for (int lane = 0; lane < 16; ++lane) most = largest[lane] > most ? largest[lane] : most;
  const std::uint32_t wide = static_cast<std::uint32_t>(most) << 16;
  float result;
  __builtin_memcpy(&result, &wide, sizeof result);
  return result;
}

// 16 values to integers at `to`; returns them.
static inline i32x16 put_integers(f32x16 values, float inverse, std::int8_t* to) {
  const i32x16 integers = convert<i32x16>(round_to_integers(values * inverse));
#if defined(OCTAVO_HAS_AVX512_BF16)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)integers));
#elif defined(__AVX2__)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)integers.low, (__m256i)integers.high), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  for (int lane = 0; lane < 16; ++lane) to[lane] = static_cast<std::int8_t>(integers[lane]);
#endif
  return integers;
}

// One row [K]: its line in each left tile, its scale, and its sums by group.
static inline void quantise_row(const bf16* x, std::int64_t size, const Integers& form, std::int8_t* line, float* scale,
                                std::int32_t* sums) {
  const float largest = largest_magnitude(x, size);
  const bool is_finite = largest < __builtin_inff(), is_zero = largest < 0x1p-120f;
  *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
  const float inverse = is_finite && !is_zero ? 127.0f / largest : 0.0f;
  const std::int64_t padded = num_k_tiles(size) * kTileK, group_size = form.group_size ? form.group_size : padded;
  for (std::int64_t k = 0; k < size; ++sums) {
    i32x16 sum = {};
    for (const std::int64_t end = smaller(padded, k + group_size); k < end; k += 16) {
      f32x16 values = k + 16 <= size ? load_bf16(x + k) : load_bf16_part(x + k, larger(0, size - k));
      if (!is_finite) values = splat(0.0f);
      sum += put_integers(values, inverse, line + k / kTileK * kTileBytes + k % kTileK);
    }
    *sums = sum_of_integers(sum);
  }
}

// All rows, normalised where that is asked for.
static void quantise_rows(const RowsArgs& args, const Integers& form, const IntegerRows& to, Pool& pool) {
  const std::int64_t num_k = num_k_tiles(args.size), groups = num_groups(form, args.size);
  // Rows of one chunk: some ten microseconds, but never less than fills a thread's caches.
  const std::int64_t together = smaller(16, larger(1, (std::int64_t{1} << 13) / larger(1, args.size)));
  pool.run(ceil_div(args.rows, together), [&](std::int64_t chunk) {
    bf16* normalised = args.norm_weight ? static_cast<bf16*>(thread_scratch().bytes(args.size * sizeof(bf16))) : nullptr;
    for (std::int64_t row = chunk * together; row < smaller(args.rows, (chunk + 1) * together); ++row) {
      if (normalised) normalise_row(args, row, normalised);
      quantise_row(normalised ? normalised : static_cast<const bf16*>(args.x) + row * args.size, args.size, form,
                   to.left + row / 16 * num_k * kTileBytes + row % 16 * kTileK, to.scales + row, to.sums + row * groups);
    }
  });
}
