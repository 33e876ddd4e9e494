// bf16 (the upper half of a float32) to float32 and back. Included inside namespace octavo::OCTAVO_LEVEL.

#if defined(OCTAVO_HAS_AVX512)  // GCC 12 compiles the generic forms into many instructions

static inline f32x16 widen(u16x16 half) {
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
}

static inline f32x16 load_bf16(const bf16* from) {
  u16x16 half;
  __builtin_memcpy(&half, from, sizeof half);
  return widen(half);
}

static inline u16x16 upper_halves(u32x16 words) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)(words >> 16)); }

static inline u16x32 side_by_side(u16x16 first, u16x16 second) {
  return (u16x32)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
}

// Non-temporal store of a cache line; visible to other threads after `end_stream`.
static inline void stream_line(void* to, u16x32 line) { _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)line); }
static inline void end_stream() { _mm_sfence(); }

#else

typedef Vector<std::uint16_t, 16> u16x8;

#if defined(__AVX2__)

static inline f32x16::Half widen(u16x8 half) {
  return (f32x16::Half)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
}
static inline f32x16 widen(u16x16 half) {
  const __m256i both = (__m256i)half;
  return {widen((u16x8)_mm256_castsi256_si128(both)), widen((u16x8)_mm256_extracti128_si256(both, 1))};
}

static inline u16x16 upper_halves(u32x16 words) {
  const u32x16 shifted = words >> 16;
  const __m256i packed = _mm256_packus_epi32((__m256i)shifted.low, (__m256i)shifted.high);
  return (u16x16)_mm256_permute4x64_epi64(packed, 0b11011000);  // packed by 128 bits
}

#else

static inline f32x16::Half widen(u16x8 half) {
  typedef f32x16::Half::Half Quarter;
  const u16x8 zero = {};
  return {(Quarter)shuffle<0, 8, 1, 9, 2, 10, 3, 11>(zero, half), (Quarter)shuffle<4, 12, 5, 13, 6, 14, 7, 15>(zero, half)};
}
static inline f32x16 widen(u16x16 half) { return {widen(half.low), widen(half.high)}; }

static inline u16x8 upper_halves(u32x16::Half words) {
#if defined(__SSE2__)
  const __m128i first = _mm_srai_epi32((__m128i)words.low, 16), second = _mm_srai_epi32((__m128i)words.high, 16);
  return (u16x8)_mm_packs_epi32(first, second);
#else
  return shuffle<1, 3, 5, 7, 9, 11, 13, 15>((u16x8)words.low, (u16x8)words.high);
#endif
}
static inline u16x16 upper_halves(u32x16 words) { return {upper_halves(words.low), upper_halves(words.high)}; }

#endif

static inline f32x16 load_bf16(const bf16* from) { return {widen(load<u16x8>(from)), widen(load<u16x8>(from + 8))}; }

static inline u16x32 side_by_side(u16x16 first, u16x16 second) { return {first, second}; }

// Non-temporal store of a cache line; visible to other threads after `end_stream`.
static inline void stream_line(void* to, u16x32 line) { store(to, line); }
static inline void end_stream() {}

#endif

// Round to nearest, ties to even; NaN stays NaN, as in torch. `narrow_both` yields a whole cache line.
#if defined(OCTAVO_HAS_BF16)

static inline u16x16 narrow(f32x16 value) {
  u16x16 result;
  const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
  __builtin_memcpy(&result, &half, sizeof result);
  return result;
}

static inline f32x16 rounded(f32x16 value) { return widen(narrow(value)); }

static inline u16x32 narrow_both(f32x16 first, f32x16 second) {
  u16x32 result;
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  __builtin_memcpy(&result, &both, sizeof result);
  return result;
}

#else

static inline u32x16 round_upper_halves(f32x16 value) {
  const u32x16 bits = (u32x16)value;
  const u32x16 nearest = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
  return select(value != value, quiet, nearest);
}
static inline u16x16 narrow(f32x16 value) { return upper_halves(round_upper_halves(value)); }
static inline f32x16 rounded(f32x16 value) { return (f32x16)(round_upper_halves(value) & 0xffff0000u); }

static inline u16x32 narrow_both(f32x16 first, f32x16 second) { return side_by_side(narrow(first), narrow(second)); }

#endif

// Loads the first `count` of 16; the others are zero.
static inline f32x16 load_bf16_part(const bf16* from, std::int64_t count) {
  u16x16 half = {};
  __builtin_memcpy(&half, from, static_cast<std::size_t>(count) * sizeof(bf16));
  return widen(half);
}

static inline void store_bf16(bf16* to, f32x16 value) { store(to, narrow(value)); }

static inline void store_bf16_part(bf16* to, f32x16 value, std::int64_t count) {
  const u16x16 half = narrow(value);
  __builtin_memcpy(to, &half, static_cast<std::size_t>(count) * sizeof(bf16));
}
