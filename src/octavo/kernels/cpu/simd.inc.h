// Vectors of 16 floats, for every level: the compiler splits them for registers that are narrower. Included inside
// namespace octavo::OCTAVO_LEVEL. No templates of the standard library here: the linker keeps one version of each, and
// that one may be of a level that this processor lacks.

typedef float f32x16 __attribute__((vector_size(64)));
typedef std::int32_t i32x16 __attribute__((vector_size(64)));
typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
typedef std::uint16_t u16x16 __attribute__((vector_size(32)));
typedef std::uint16_t u16x32 __attribute__((vector_size(64)));

static inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
static inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
static inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// An integer that a template reads off a function's argument.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

static inline f32x16 splat(float value) { return f32x16{} + value; }

static inline f32x16 load_f32(const float* from) {
  f32x16 result;
  __builtin_memcpy(&result, from, sizeof result);
  return result;
}

static inline void store_f32(float* to, f32x16 value) { __builtin_memcpy(to, &value, sizeof value); }

static inline f32x16 widen(u16x16 half) {
#if defined(OCTAVO_HAS_AVX512_BF16)  // GCC 12 makes many instructions of the general form
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}

static inline f32x16 load_bf16(const bf16* from) {
  u16x16 half;
  __builtin_memcpy(&half, from, sizeof half);
  return widen(half);
}

// The first `count` of 16; the others are zero.
static inline f32x16 load_bf16_part(const bf16* from, std::int64_t count) {
  u16x16 half = {};
  __builtin_memcpy(&half, from, static_cast<std::size_t>(count) * sizeof(bf16));
  return widen(half);
}

// To the nearest, ties to even, NaN stays NaN: as torch rounds.
static inline u16x16 narrow(f32x16 value) {
#if defined(OCTAVO_HAS_AVX512_BF16)
  u16x16 result;
  const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
  __builtin_memcpy(&result, &half, sizeof result);
  return result;
#else
  const u32x16 bits = (u32x16)value;
  const u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32x16 is_nan = (u32x16)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((rounded & ~is_nan) | ((bits >> 16 | 0x40) & is_nan), u16x16);
#endif
}

// Two vectors side by side, in a whole cache line.
static inline u16x32 narrow_both(f32x16 first, f32x16 second) {
  u16x32 result;
#if defined(OCTAVO_HAS_AVX512_BF16)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  __builtin_memcpy(&result, &both, sizeof result);
#else
  const u16x16 halves[2] = {narrow(first), narrow(second)};
  __builtin_memcpy(&result, halves, sizeof result);
#endif
  return result;
}

static inline void store_bf16(bf16* to, f32x16 value) {
  const u16x16 half = narrow(value);
  __builtin_memcpy(to, &half, sizeof half);
}

static inline void store_bf16_part(bf16* to, f32x16 value, std::int64_t count) {
  const u16x16 half = narrow(value);
  __builtin_memcpy(to, &half, static_cast<std::size_t>(count) * sizeof(bf16));
}

// Writes a cache line past the caches, into memory; others see it after `end_stream`.
static inline void stream_line(void* to, u16x32 line) {
#if defined(OCTAVO_HAS_AVX512_BF16)
  _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)line);
#else
  __builtin_memcpy(to, &line, sizeof line);
#endif
}

static inline void end_stream() {
#if defined(OCTAVO_HAS_AVX512_BF16)
  _mm_sfence();
#endif
}

// Always in the same order.
static inline float sum_of_lanes(f32x16 value) {
#if defined(OCTAVO_HAS_AVX512_BF16)
  const __m512d all = (__m512d)value;
  const __m256 eight = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(all)), _mm256_castpd_ps(_mm512_extractf64x4_pd(all, 1)));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[16];
  store_f32(lanes, value);
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
#endif
}

static inline float max_of_lanes(f32x16 value) {
  float lanes[16];
  store_f32(lanes, value);
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
  return lanes[0];
}

// e^r for |r| <= ln(2) / 2: the Taylor polynomial of degree 7, remainder below 1e-8.
static inline f32x16 taylor_exponential(f32x16 r) {
  f32x16 p = splat(1.98412698e-4f);
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  return p * r + 1.0f;
}

// e^x = 2^n * e^r, to 2 units in the last place; infinity above 88.7, NaN for NaN. Below -87.3, where results have no
// full precision any more, AVX-512 goes on down to the least of them, the general form returns 0.
#if defined(OCTAVO_HAS_AVX512_BF16)

static inline f32x16 exponential(f32x16 x) {
  // Of the two operands, max and min return the second where either is NaN.
  const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x));
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)((f32x16)bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
  const f32x16 r = ((f32x16)bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  return (f32x16)_mm512_scalef_ps((__m512)taylor_exponential(r), (__m512)n);
}

// By an estimate of 14 bits and one step of Newton's: 2 units in the last place.
static inline f32x16 reciprocal(f32x16 x) {
  const f32x16 estimate = (f32x16)_mm512_rcp14_ps((__m512)x);
  return estimate * (2.0f - x * estimate);
}

#else

static inline f32x16 exponential(f32x16 x) {
  const f32x16 low = splat(-87.33654f), high = splat(88.72284f);
  const i32x16 is_low = x < low, is_high = x > high;
  const f32x16 bounded = (f32x16)(((i32x16)x & ~is_low & ~is_high) | ((i32x16)low & is_low) | ((i32x16)high & is_high));
  const f32x16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = bounded * 1.44269504f + shift;
  const f32x16 n = shifted - shift;
  const f32x16 r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  // 2^n in two factors: n reaches 128, which no float's exponent holds.
  const i32x16 exponent = (i32x16)shifted - (i32x16)shift;
  const i32x16 half = exponent >> 1;
  const f32x16 result = taylor_exponential(r) * (f32x16)((half + 127) << 23) * (f32x16)((exponent - half + 127) << 23);
  const i32x16 infinity = (i32x16)splat(__builtin_inff());
  return (f32x16)(((i32x16)result & ~is_low & ~is_high) | (infinity & is_high));
}

static inline f32x16 reciprocal(f32x16 x) { return 1.0f / x; }

#endif

// x / (1 + e^-x). Where e^-x would overflow it stops at e^87, so that its reciprocal stays a number.
static inline f32x16 silu(f32x16 x) {
  const f32x16 bound = splat(-87.0f);
  const i32x16 is_low = x < bound;
  const f32x16 bounded = (f32x16)(((i32x16)x & ~is_low) | ((i32x16)bound & is_low));
  return x * reciprocal(1.0f + exponential(-bounded));
}
