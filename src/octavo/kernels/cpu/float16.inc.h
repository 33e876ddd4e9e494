// f16 to float32 and back. Included inside namespace octavo::OCTAVO_LEVEL, after bfloat16.inc.h.

// As many as a register holds as float32.
#if defined(OCTAVO_HAS_AVX512)

static inline Register widen_lanes(const f16* from) {
  return (Register)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

static inline f32x16 load_f16(const f16* from) { return widen_lanes(from); }

// Round to nearest, ties to even, to infinity beyond 65,504.
static inline u16x16 narrow(f16, f32x16 value) {
  return (u16x16)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif defined(__AVX2__)

static inline Register widen_lanes(const f16* from) {
  return (Register)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

static inline f32x16 load_f16(const f16* from) { return {widen_lanes(from), widen_lanes(from + 8)}; }

static inline u16x16 narrow(f16, f32x16 value) {
  const __m128i low = _mm256_cvtps_ph((__m256)value.low, _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph((__m256)value.high, _MM_FROUND_TO_NEAREST_INT);
  return (u16x16)_mm256_set_m128i(high, low);
}

#else

typedef std::uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// The bits of exponent and mantissa, shifted to those of a float32, are the value times 2^-112, denormal or not.
static inline Register widen_lanes(const f16* from) {
  const Words bits = convert<Words>(load<Halves>(from)), magnitude = (bits & 0x7fff) << 13;
  const Words finite = (Words)((Register)magnitude * 0x1p112f);
  const Words value = (Words)(magnitude >= 0x0f800000u) & 0x7f800000u;  // the exponent of infinity and NaN
  return (Register)((finite | value) | (bits & 0x8000) << 16);
}

static inline f32x16 load_f16(const f16* from) {
  return {{widen_lanes(from), widen_lanes(from + 4)}, {widen_lanes(from + 8), widen_lanes(from + 12)}};
}

static inline u16x16 narrow(f16, f32x16 value) {
  const u32x16 bits = (u32x16)value, magnitude = bits & 0x7fffffff;
  // Normal: another bias of the exponent, and the mantissa rounded, with a carry into the exponent.
  const u32x16 normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Denormal: the sum with 1/2 has its last bit where a denormal has it.
  const u32x16 denormal = (u32x16)((f32x16)magnitude + 0.5f) - 0x3f000000;
  const u32x16 beyond = (magnitude >> 13 & 0x1ff) | 0x7e00;  // NaN, made quiet
  const i32x16 as_integers = (i32x16)magnitude;              // compared as such, they have the order of magnitudes
  u32x16 result = select(as_integers < 0x38800000, denormal, normal);
  result = select(as_integers >= 0x47800000, u32x16{} + 0x7c00, result);
  result = select(as_integers > 0x7f800000, beyond, result);
  return upper_halves((result | (bits >> 16 & 0x8000)) << 16);
}

#endif
