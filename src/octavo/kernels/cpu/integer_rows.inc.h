// Quantizes activations to integers, each row with its own scale. Included inside namespace octavo::OCTAVO_LEVEL.
//
// x is approximated by scale * q, scale = max|x| / 127, q rounded to nearest, ties to even. A row that is not finite gets
// a scale of NaN, so that it affects only its own results. For rotated weights, rows are rotated first.

// Rows [T, K] ready for products.
struct IntegerRows {
  std::int8_t* left;   // left tiles [row tiles][num_k][16][64]; padding rows are undefined, padding k are zero
  float* scales;       // [T]
  std::int32_t* sums;  // [T, groups] of q, in the groups of the weight; or for weights in blocks
                       // [row tiles, K / 32] TileGroup
};

// How many int32 a row has in addition to its q and its scale.
static inline std::int64_t num_row_sums(const Integers& form, std::int64_t size) {
  return form.blocks.num_parts ? ceil_div(size, kUnitK) * kTileGroupInts : num_groups(form, size);
}

// The sums of a row: every `step`th from `first` on. For weights in blocks: a lane of each TileGroup, from the first on.
struct SumsOfRow {
  std::int32_t* first;
  std::int64_t step;
};

static inline SumsOfRow sums_of_row(const IntegerRows& rows, const Integers& form, std::int64_t row, std::int64_t num_sums) {
  if (form.blocks.num_parts == 0) return {rows.sums + row * num_sums, 1};
  return {rows.sums + row / 16 * 16 * num_sums + row % 16, 16};
}

static inline std::size_t integer_rows_bytes(std::int64_t rows, std::int64_t size, std::int64_t groups) {
  const std::int64_t left = ceil_div(rows, 16) * num_k_tiles(size) * kTileBytes;
  return static_cast<std::size_t>(left + ceil_div(rows, 16) * 16 * (groups + 1) * 4);
}

static inline IntegerRows place_integer_rows(void* memory, std::int64_t rows, std::int64_t size) {
  std::int8_t* left = static_cast<std::int8_t*>(memory);
  float* scales = reinterpret_cast<float*>(left + ceil_div(rows, 16) * num_k_tiles(size) * kTileBytes);
  return {left, scales, reinterpret_cast<std::int32_t*>(scales + ceil_div(rows, 16) * 16)};
}

static inline std::int32_t sum_of_integers(i32x16 value) {
#if defined(OCTAVO_HAS_AVX512)
  return _mm512_reduce_add_epi32((__m512i)value);
#else
  std::int32_t sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += value[lane];
  return sum;
#endif
}

// The largest magnitude of a row; NaN is the largest. As integers, magnitudes of floats have the same order.
template <class Element>
static inline float largest_magnitude(const Element* x, std::int64_t size) {
  u16x32 largest = {};
  const auto meet = [&](u16x32 bits) {
    bits &= 0x7fff;
#if defined(OCTAVO_HAS_AVX512)
    largest = (u16x32)_mm512_max_epu16((__m512i)largest, (__m512i)bits);
#else
    largest = select(bits > largest, bits, largest);
#endif
  };
  const std::int64_t num_whole = size / 32 * 32;
  for (std::int64_t i = 0; i < num_whole; i += 32) meet(load<u16x32>(x + i));
  u16x32 rest = {};
  __builtin_memcpy(&rest, x + num_whole, static_cast<std::size_t>(size - num_whole) * sizeof(Element));
  meet(rest);
  std::uint16_t most = 0;
  for (int lane = 0; lane < 32; ++lane) most = largest[lane] > most ? largest[lane] : most;
  Element element;
  __builtin_memcpy(&element, &most, sizeof element);
  return load_part(&element, 1)[0];
}

// 64 of a row, from k on, padded with zeros.
template <class Element>
static inline void load_row_line(const Element* x, std::int64_t k, std::int64_t size, f32x16 (&values)[4]) {
  for (int i = 0; i < 4; ++i)
    values[i] = k + kTileK <= size ? load_whole(x + k + i * 16)
                                   : load_part(x + k + i * 16, smaller(16, larger(0, size - k - i * 16)));
}

// The largest magnitude of vectors of floats, as above.
struct LargestMagnitude {
  u32x16 bits = {};

  void meet(f32x16 values) {
    const u32x16 others = (u32x16)values & 0x7fffffffu;
#if defined(OCTAVO_HAS_AVX512)
    bits = (u32x16)_mm512_max_epu32((__m512i)bits, (__m512i)others);
#else
    bits = select((i32x16)others > (i32x16)bits, others, bits);
#endif
  }

  float value() const {
    std::uint32_t most = 0;
    for (int lane = 0; lane < 16; ++lane) most = bits[lane] > most ? bits[lane] : most;
    float result;
    __builtin_memcpy(&result, &most, sizeof result);
    return result;
  }
};

// Rotates a row [K] to `wide`, padded with zeros to whole k tiles, and returns the largest magnitude, NaN if any.
template <class Element>
static inline float rotate_row(const Element* x, std::int64_t size, const Integers& form, float* wide) {
  LargestMagnitude of_blocks;
  for (std::int64_t k = 0; k < size; k += kTileK) {
    f32x16 values[4];
    load_row_line(x, k, size, values);
    if (k + kTileK <= size) rotate_block(values);
    for (int i = 0; i < 4; ++i) {
      store_f32(wide + k + i * 16, values[i]);
      of_blocks.meet(values[i]);
    }
  }
  if (!form.mixes_blocks) return of_blocks.value();
  mix_blocks(wide, size);
  LargestMagnitude of_row;
  for (std::int64_t k = 0; k < num_k_tiles(size) * kTileK; k += 16) of_row.meet(load_f32(wide + k));
  return of_row.value();
}

// Sums of q, still in lanes, of the two units of a k tile.
struct UnitSums {
  i32x16 first = {}, second = {};
};

#if defined(OCTAVO_HAS_AVX512)

// A row's line of a k tile: 64 values to integers at `to`, which are added to `sums`.
static inline void put_line(const f32x16 (&values)[4], float inverse, std::int8_t* to, UnitSums& sums) {
  const auto integers = [&](int i) {
    return _mm512_cvt_roundps_epi32((__m512)(values[i] * inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  };
  // Packed by 128 bits: of four quads each, which then go to their places.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i words[2] = {_mm512_packs_epi32(integers(0), integers(1)), _mm512_packs_epi32(integers(2), integers(3))};
  const __m512i line = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words[0], words[1]));
  _mm512_store_si512(to, line);
  const __m512i ones = _mm512_set1_epi8(1);
  sums.first = (i32x16)_mm512_mask_dpbusd_epi32((__m512i)sums.first, 0x00ff, ones, line);
  sums.second = (i32x16)_mm512_mask_dpbusd_epi32((__m512i)sums.second, 0xff00, ones, line);
}

#else

// 16 values to integers at `to`; returns them.
static inline i32x16 put_integers(f32x16 values, float inverse, std::int8_t* to) {
  const i32x16 integers = convert<i32x16>(round_to_integers(values * inverse));
#if defined(__AVX2__)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)integers.low, (__m256i)integers.high), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  for (int lane = 0; lane < 16; ++lane) to[lane] = static_cast<std::int8_t>(integers[lane]);
#endif
  return integers;
}

// A row's line of a k tile: 64 values to integers at `to`, which are added to `sums`.
static inline void put_line(const f32x16 (&values)[4], float inverse, std::int8_t* to, UnitSums& sums) {
  for (int i = 0; i < 2; ++i) sums.first += put_integers(values[i], inverse, to + i * 16);
  for (int i = 2; i < 4; ++i) sums.second += put_integers(values[i], inverse, to + i * 16);
}

#endif

// One row [K]: its line in each left tile, its scale, and its sums by group. `wide` holds whole k tiles of a row
// that is rotated; null: it is not.
template <class Element>
static inline void quantize_row(const Element* x, std::int64_t size, const Integers& form, float* wide, std::int8_t* line,
                                float* scale, SumsOfRow of_row) {
  if (form.blocks.num_parts)
    return quantize_row_by_groups(x, size, line, scale, reinterpret_cast<TileGroup*>(of_row.first));
  std::int32_t* sums = of_row.first;
  const float largest = wide ? rotate_row(x, size, form, wide) : largest_magnitude(x, size);
  const bool is_finite = largest < __builtin_inff(), is_zero = largest < 0x1p-120f;
  *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
  const float inverse = is_finite && !is_zero ? 127.0f / largest : 0.0f;
  const std::int64_t num_k = num_k_tiles(size);
  UnitSums now;
  for (std::int64_t k_tile = 0; k_tile < num_k; ++k_tile, line += kTileBytes) {
    const std::int64_t k = k_tile * kTileK;
    f32x16 values[4] = {};
    if (is_finite && wide)
      for (int i = 0; i < 4; ++i) values[i] = load_f32(wide + k + i * 16);
    else if (is_finite)
      load_row_line(x, k, size, values);
    put_line(values, inverse, line, now);
    if (form.group_size == kUnitK) {
      *sums++ = sum_of_integers(now.first);
      if (k + kUnitK < size) *sums++ = sum_of_integers(now.second);
      now = {};
    } else if (k_tile + 1 == num_k || (form.group_size != 0 && (k + kTileK) % form.group_size == 0)) {
      *sums++ = sum_of_integers(now.first + now.second);
      now = {};
    }
  }
}

// The scratch memory that a thread needs to rotate a row [K].
static inline std::size_t rotated_bytes(const Integers& form, std::int64_t size) {
  return form.is_rotated ? static_cast<std::size_t>(num_k_tiles(size) * kTileK) * sizeof(float) : 0;
}

// All rows, normalized first if the op has a norm.
template <class Element>
static void quantize_rows(const RowsArgs& args, const Integers& form, const IntegerRows& to, Pool& pool) {
  const InPhase phase(pool.phases(), Phase::rows);
  const std::int64_t num_k = num_k_tiles(args.size), groups = num_row_sums(form, args.size);
  // Rows of one chunk: about ten microseconds.
  const std::int64_t together = smaller(16, larger(1, (std::int64_t{1} << 13) / larger(1, args.size)));
  pool.run(ceil_div(args.rows, together), [&](std::int64_t chunk) {
    const std::size_t wide_bytes = rotated_bytes(form, args.size);
    char* memory = static_cast<char*>(thread_scratch().bytes(wide_bytes + static_cast<std::size_t>(args.size) * sizeof(Element)));
    float* wide = form.is_rotated ? reinterpret_cast<float*>(memory) : nullptr;
    Element* normalized = args.fused.norm_weight ? reinterpret_cast<Element*>(memory + wide_bytes) : nullptr;
    for (std::int64_t row = chunk * together; row < smaller(args.rows, (chunk + 1) * together); ++row) {
      if (normalized) normalize_row(args, row, normalized);
      quantize_row(normalized ? normalized : static_cast<const Element*>(args.x) + row * args.size, args.size, form, wide,
                   to.left + row / 16 * num_k * kTileBytes + row % 16 * kTileK, to.scales + row,
                   sums_of_row(to, form, row, groups));
    }
  });
}
