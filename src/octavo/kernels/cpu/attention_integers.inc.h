// Integer products with int8 keys and values: queries and weights are rounded to int16 with one float32 scale per row.
// Included inside namespace octavo::OCTAVO_LEVEL.
//
// Products and sums are exact: 256 times 127 * 32767 fits into 32 bits. A row's largest weight has 15 bits, twice as
// many as in bf16.

constexpr float kMaxOfRow = 32767.0f;
constexpr float kLeastOfRow = 1e-30f;  // rows with a smaller maximum become zeros: a reciprocal might overflow

// Start of a row in left parts, [row tiles][num_parts].
static inline char* left_row(void* parts, std::int64_t num_parts, std::int64_t row) {
  constexpr std::int64_t kRowBytes = kLeftBytes<std::int8_t> / kTileRows;
  const std::int64_t row_tile = row / kTileRows * num_parts * kLeftBytes<std::int8_t>;
  return static_cast<char*>(parts) + row_tile + row % kTileRows * kRowBytes;
}

// Rounds `count` numbers, a multiple of 16, to a row of left parts. Returns their scale: NaN if a number is not finite.
template <class Number>
static inline float round_row(const Number* from, std::int64_t count, char* left) {
  f32x16 most = splat(0.0f), bad = splat(0.0f);
  for (std::int64_t i = 0; i < count; i += 16) {
    const f32x16 value = load_some(from + i, 16);
    most = greater((f32x16)_mm512_abs_ps((__m512)value), most);
    bad += value - value;  // NaN if one is not finite
  }
  const float max = _mm512_reduce_max_ps((__m512)most);
  const float factor = max < kLeastOfRow ? 0.0f : kMaxOfRow / max;
  for (std::int64_t i = 0; i < count; i += 16) {
    const __m512i whole = _mm512_cvtps_epi32((__m512)(load_some(from + i, 16) * factor));
    char* to = left + i / kPart * kLeftBytes<std::int8_t> + i % kPart * 2;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(whole));
  }
  return max / kMaxOfRow + sum_of_lanes(bad);
}

// Integers to floats, in place.
static inline void scale_sums(float* sums, f32x16 scales) {
  store_f32(sums, (f32x16)_mm512_cvtepi32_ps((__m512i)load_f32(sums)) * scales);
}

// Writes a token's key or value [P] to position `at` of a tile.
static inline void put_key(std::int8_t* tile, std::int64_t at, const std::int8_t* key, std::int64_t padded) {
  for (std::int64_t i = 0; i < padded; i += 2)
    __builtin_memcpy(tile + i / kPart * kRightElements + right_index(bf16{}, i % kPart, at), key + i, 2);
}

static inline void put_value(std::int8_t* tile, std::int64_t at, const std::int8_t* value, std::int64_t padded) {
  std::int8_t* to = tile + at / 2 * 32;
  for (std::int64_t i = 0; i < padded; i += 16, to += kTileElements) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(value + i)));
    if (at % 2 == 0) {
      _mm256_mask_storeu_epi8(to, 0x55555555, wide);
    } else {
      _mm256_mask_storeu_epi8(to, 0xaaaaaaaa, _mm256_slli_epi16(wide, 8));
    }
  }
}

// Rounds 16 numbers up to 127 to nearest.
static inline void round_to_bytes(f32x16 value, std::int8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)value)));
}

static inline void widen_bytes(const std::int8_t* from, std::int64_t count, std::int8_t* to) {
  __builtin_memcpy(to, from, static_cast<std::size_t>(count));
}

static inline bool is_finite(const std::int8_t*, std::int64_t) { return true; }
