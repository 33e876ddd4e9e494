// Scalars, and vectors of 16 floats. Included inside namespace octavo::OCTAVO_LEVEL.

static inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
static inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
static inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// An integer that a template deduces from a function argument.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

#if defined(OCTAVO_HAS_AVX512)  // not `load`: in two functions GCC 12 allocates registers differently
static inline f32x16 splat(float value) { return f32x16{} + value; }

static inline f32x16 load_f32(const float* from) {
  f32x16 result;
  __builtin_memcpy(&result, from, sizeof result);
  return result;
}

static inline void store_f32(float* to, f32x16 value) { __builtin_memcpy(to, &value, sizeof value); }
#else
static inline f32x16 splat(float value) { return value - f32x16{}; }  // adding zeros would cost an instruction
static inline f32x16 load_f32(const float* from) { return load<f32x16>(from); }
static inline void store_f32(float* to, f32x16 value) { store(to, value); }
#endif

static inline f32x16 greater(f32x16 a, f32x16 b) {  // b if either is NaN
#if defined(OCTAVO_HAS_AVX512)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

// The sum of lanes, always in the same order, and their maximum.
#if defined(OCTAVO_HAS_AVX512)

static inline float sum_of_lanes(f32x16 value) {
  const __m512d all = (__m512d)value;
  const __m256 eight = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(all)), _mm256_castpd_ps(_mm512_extractf64x4_pd(all, 1)));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float max_of_lanes(f32x16 value) {
  float lanes[16];
  store_f32(lanes, value);
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
  return lanes[0];
}

#else

// Folds a vector in halves with `join`.
template <class V, class Join>
[[gnu::always_inline]] static inline float fold_lanes(V value, const Join& join) {
  if constexpr (kIsPair<V>) {
    return fold_lanes(join(value.low, value.high), join);
  } else if constexpr (sizeof(V) == 32) {
    value = join(value, shuffle<4, 5, 6, 7, 0, 1, 2, 3>(value, value));
    value = join(value, shuffle<2, 3, 0, 1, 6, 7, 4, 5>(value, value));
    return join(value, shuffle<1, 0, 3, 2, 5, 4, 7, 6>(value, value))[0];
  } else {
    value = join(value, shuffle<2, 3, 0, 1>(value, value));
    return join(value, shuffle<1, 0, 3, 2>(value, value))[0];
  }
}

static inline float sum_of_lanes(f32x16 value) {
  return fold_lanes(value, [](auto a, auto b) { return a + b; });
}

static inline float max_of_lanes(f32x16 value) {
  return fold_lanes(value, [](auto a, auto b) { return select(a > b, a, b); });
}

#endif

// e^r for |r| <= ln(2) / 2: Taylor polynomial of degree 7, remainder below 1e-8.
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

// e^x = 2^n * e^r, within 2 ulp; infinity above 88.7, NaN for NaN. Below -87.3, results are denormal, down to the
// smallest.
#if defined(OCTAVO_HAS_AVX512)

[[gnu::always_inline]] static inline f32x16 exponential(f32x16 x) {
  // max and min return the second operand if either is NaN.
  const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x));
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)((f32x16)bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
  const f32x16 r = ((f32x16)bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  return (f32x16)_mm512_scalef_ps((__m512)taylor_exponential(r), (__m512)n);
}

// A 14-bit estimate and one Newton step: within 2 ulp.
static inline f32x16 reciprocal(f32x16 x) {
  const f32x16 estimate = (f32x16)_mm512_rcp14_ps((__m512)x);
  return estimate * (2.0f - x * estimate);
}

#else

[[gnu::always_inline]] static inline f32x16 exponential(f32x16 x) {
  const f32x16 low = splat(-104.0f), high = splat(89.0f);
  const f32x16 least = greater(low, x), bounded = select(least > high, high, least);
  const f32x16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = bounded * 1.44269504f + shift;
  const f32x16 n = shifted - shift;
  const f32x16 r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  // 2^n in two factors: n ranges from -150 to 128, beyond a float's exponent.
  const i32x16 exponent = (i32x16)shifted - (i32x16)shift;
  const i32x16 half = exponent >> 1;
  return taylor_exponential(r) * (f32x16)((half + 127) << 23) * (f32x16)((exponent - half + 127) << 23);
}

// No estimate instruction: its results differ between vendors.
static inline f32x16 reciprocal(f32x16 x) { return 1.0f / x; }

#endif

// x / (1 + e^-x). e^-x is capped at e^87, so that its reciprocal stays finite.
[[gnu::always_inline]] static inline f32x16 silu(f32x16 x) {
  const f32x16 bound = splat(-87.0f);
  const i32x16 is_low = x < bound;
  const f32x16 bounded = (f32x16)(((i32x16)x & ~is_low) | ((i32x16)bound & is_low));
  return x * reciprocal(1.0f + exponential(-bounded));
}

// x times the sigmoid of `logits`, capped as above.
static inline f32x16 swish(f32x16 x, f32x16 logits) {
  const f32x16 bound = splat(-87.0f);
  return x * reciprocal(1.0f + exponential(-select(logits < bound, bound, logits)));
}

// GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) by a tanh.
static inline f32x16 gelu(f32x16 x) {
  const f32x16 inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return swish(x, 2.0f * inner);
}

// The other gates: `Activation` of kernels/types.py. One cold copy, away from the common one.
[[gnu::noinline, gnu::cold]] static f32x16 gated_otherwise(const Activation& activation, f32x16 gate, f32x16 up) {
  if (activation.kind == ActivationKind::gelu_tanh) return gelu(gate) * up;
  if (activation.kind == ActivationKind::scaled_silu) {
    const f32x16 scaled = activation.alpha * gate;
    return swish(scaled, scaled) * up;
  }
  const f32x16 most = splat(activation.limit), least = splat(-activation.limit);
  gate = select(gate > most, most, gate);  // NaN stays
  up = select(up > most, most, select(up < least, least, up));
  return swish(gate, activation.alpha * gate) * (up + 1.0f);
}

[[gnu::always_inline]] static inline f32x16 gated(const Activation& activation, f32x16 gate, f32x16 up) {
  if (__builtin_expect(activation.kind != ActivationKind::silu, false)) return gated_otherwise(activation, gate, up);
  return silu(gate) * up;
}

// An activation without a gate: relu(x)^2, where NaN stays, or GELU.
static inline f32x16 ungated(const Activation& activation, f32x16 x) {
  if (activation.kind == ActivationKind::plain_gelu) return gelu(x);
  const f32x16 positive = select(x < 0.0f, splat(0.0f), x);
  return positive * positive;
}
