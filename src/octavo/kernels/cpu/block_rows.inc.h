// Quantizes activations in groups of 32, each with its own scale, for weights in blocks. Included inside namespace
// octavo::OCTAVO_LEVEL.
//
// x is approximated by scale * q, scale = max|x| of the group / 127, q rounded to the nearest integer, ties to even.

// Where an instruction requires unsigned codes, a bias is added when they are expanded, and subtracted from the initial
// sums: 128 for all types with vpdpbusd; none for small codes with vpmaddubsw.
#if defined(OCTAVO_HAS_AVX512) || defined(OCTAVO_HAS_VNNI)
constexpr std::int32_t kBeginFactor = 128;
constexpr int bias_of(const BlockTraits&) { return 128; }
// What codes have that are multiplied as they are stored.
constexpr int stored_bias_of(const BlockTraits& traits) { return traits.is_table ? 128 : traits.zero; }

// Initial sums for codes of kBeginFactor, made those of `bias`: 128 or a smaller power of two.
template <class V>
[[gnu::always_inline]] static inline V with_bias(V begin, int bias) {
  return bias == 128 ? begin : begin >> (7 - __builtin_ctz(static_cast<unsigned>(bias)));
}
#else
constexpr std::int32_t kBeginFactor = 1;  // the bias, which differs by type, is multiplied later
#if defined(OCTAVO_HAS_AVX2)
// Of tables, those whose values are all positive with the zero: at most 5 bits.
constexpr bool has_small_codes(const BlockTraits& traits) { return traits.bits < 8 && (!traits.is_table || traits.zero > 0); }
constexpr int bias_of(const BlockTraits& traits) { return has_small_codes(traits) ? traits.zero : 0; }
#else
constexpr int bias_of(const BlockTraits&) { return 0; }
#endif
constexpr int stored_bias_of(const BlockTraits& traits) { return bias_of(traits); }
#endif

// Per-row factors of a group of 32 q, for the 16 rows of a row tile, ready to be broadcast; laid out as [row tiles][groups]:
// by row, rows whose size is a power of two would evict one another from the first-level cache.
struct TileGroup {
  float scale[16];
  std::int32_t begin[16];          // the initial sums of products: -kBeginFactor * sum of q
  float scaled_sum[16];            // scale * sum of q
  std::int32_t begin_half[2][16];  // the same of 16 q each
  float scaled_half[2][16];
};
constexpr std::int64_t kTileGroupInts = sizeof(TileGroup) / 4 / 16;  // of a row

template <class Element>
static inline float largest_magnitude(const Element* x, std::int64_t size);  // integer_rows.inc.h

static inline float largest_of_group(f32x16 a, f32x16 b) {
#if defined(OCTAVO_HAS_AVX512)
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps((__m512)a), _mm512_abs_ps((__m512)b)));
#else
  const f32x16 first = (f32x16)((u32x16)a & 0x7fffffffu), second = (f32x16)((u32x16)b & 0x7fffffffu);
  return max_of_lanes(select(first > second, first, second));
#endif
}

// Puts a group's 32 values, times `inverse`, at `to` as integers; `sums` are those of its halves.
static inline void put_group(f32x16 first, f32x16 second, float inverse, std::int8_t* to, std::int32_t (&sums)[2]) {
#if defined(OCTAVO_HAS_AVX512)
  const auto put = [&](f32x16 values, int half) {
    const __m512i integers = _mm512_cvt_roundps_epi32((__m512)(values * inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + half * 16), _mm512_cvtepi32_epi8(integers));
    sums[half] = _mm512_reduce_add_epi32(integers);
  };
  put(first, 0), put(second, 1);
#elif defined(__AVX2__)
  const auto words = [&](f32x16 values) {
    const i32x16 integers = convert<i32x16>(round_to_integers(values * inverse));
    return _mm256_packs_epi32((__m256i)integers.low, (__m256i)integers.high);
  };
  // Packed by 128 bits: of four quads each, which then go to their places.
  const __m256i packed = _mm256_packs_epi16(words(first), words(second));
  const __m256i bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
  __m256i lanes = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));  // four of each half
  lanes = _mm256_hadd_epi32(lanes, lanes), lanes = _mm256_hadd_epi32(lanes, lanes);
  sums[0] = _mm256_extract_epi32(lanes, 0), sums[1] = _mm256_extract_epi32(lanes, 4);
#else
  const i32x16 integers[2] = {convert<i32x16>(round_to_integers(first * inverse)), convert<i32x16>(round_to_integers(second * inverse))};
  for (int half = 0; half < 2; ++half) {
    sums[half] = 0;
    for (int lane = 0; lane < 16; ++lane) {
      to[half * 16 + lane] = static_cast<std::int8_t>(integers[half][lane]);
      sums[half] += integers[half][lane];
    }
  }
#endif
}

// One row [K]: its line in each left tile; its scale, 1, or NaN where the row is not finite; its lane of each group, which
// is the first of `groups`.
template <class Element>
static inline void quantize_row_by_groups(const Element* x, std::int64_t size, std::int8_t* line, float* scale, TileGroup* groups) {
  const bool is_finite = largest_magnitude(x, size) < __builtin_inff();
  *scale = is_finite ? 1.0f : __builtin_nanf("");
  for (std::int64_t group = 0; group < size / kUnitK; ++group) {
    const f32x16 first = is_finite ? load_whole(x + group * kUnitK) : splat(0.0f);
    const f32x16 second = is_finite ? load_whole(x + group * kUnitK + 16) : splat(0.0f);
    const float largest = largest_of_group(first, second);
    const bool is_zero = largest < 0x1p-120f;
    const float of_group = is_zero ? 0.0f : largest / 127.0f, inverse = is_zero ? 0.0f : 127.0f / largest;
    std::int8_t* to = line + group / 2 * kTileBytes + group % 2 * kUnitK;
    std::int32_t sums[2];
    put_group(first, second, inverse, to, sums);
    const std::int32_t sum = sums[0] + sums[1];
    TileGroup& of = groups[group];
    of.scale[0] = of_group, of.begin[0] = -kBeginFactor * sum, of.scaled_sum[0] = of_group * static_cast<float>(sum);
    for (int half = 0; half < 2; ++half) {
      of.begin_half[half][0] = -kBeginFactor * sums[half];
      of.scaled_half[half][0] = of_group * static_cast<float>(sums[half]);
    }
  }
}
