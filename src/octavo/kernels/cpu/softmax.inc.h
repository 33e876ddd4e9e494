// Online softmax. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Scores of one row over a span of positions become weights relative to the span's own maximum; spans are then joined
// in order. So a span's contribution is the same wherever it is computed. Milakov and Gimelshein 2018,
// arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135.

constexpr float kLog2E = 1.44269504f;  // weights are powers of two, not of e
constexpr float kNothing = -__builtin_inff();  // the score of a masked position

// Precision of weights: far below their rounding error.
struct ToSingle {  // Taylor polynomial of degree 6, remainder below 2e-8
  static inline f32x16 slope(f32x16 f) {  // (2^f - 1) / f
    f32x16 p = splat(1.54035304e-4f);
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    return p * f + 6.93147181e-1f;
  }
  static inline f32x16 fraction(f32x16 f) { return slope(f) * f + 1.0f; }
};
struct ToHalf {  // Chebyshev interpolation of degree 4, error below 4e-6
  static inline f32x16 fraction(f32x16 f) {
    f32x16 p = splat(0.00966636852f);
    p = p * f + 0.0559219758f;
    p = p * f + 0.24022349f;
    p = p * f + 0.693121045f;
    return p * f + 1.0f;
  }
};

// 2^x for x <= 0; exactly 0 below -126, NaN for NaN. x = n + f with |f| <= 1/2.
template <class Exactness>
static inline f32x16 power_of_two(f32x16 x) {
  const f32x16 shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to an integer, in the low bits
  const f32x16 f = x - (shifted - 12582912.0f);
  const i32x16 exponent = (i32x16)shifted << 23;
#if defined(OCTAVO_HAS_AVX512)
  const __mmask16 is_positive = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (f32x16)_mm512_maskz_add_epi32(is_positive, (__m512i)Exactness::fraction(f), (__m512i)exponent);
#else
  const i32x16 is_zero = x < -126.0f;
  return (f32x16)(((u32x16)Exactness::fraction(f) + (u32x16)exponent) & ~(u32x16)is_zero);
#endif
}

// tanh, to a few ulps; NaN for NaN. Computed from 2^y - 1 = e^-2|x| - 1, which is accurate near 0.
static inline f32x16 hyperbolic_tangent(f32x16 x) {
  const f32x16 size = select(x < 0.0f, -x, x);
  const f32x16 y = select(size > 10.0f, splat(10.0f), size) * -2.88539008f;
  const f32x16 shifted = y + 12582912.0f;  // as above
  const f32x16 f = y - (shifted - 12582912.0f);
  const f32x16 power = (f32x16)(((i32x16)shifted + 127) << 23);
  const f32x16 less = power * (ToSingle::slope(f) * f) + (power - 1.0f);
  const f32x16 result = -less / (less + 2.0f);
  return select(x < 0.0f, -result, result);
}

static inline f32x16 weight_of(bf16, f32x16 x) { return power_of_two<ToHalf>(x); }
static inline f32x16 weight_of(f16, f32x16 x) { return power_of_two<ToHalf>(x); }
static inline f32x16 weight_of(float, f32x16 x) { return power_of_two<ToSingle>(x); }

// The largest lane of each of 16 vectors, and the sum of each one's lanes, always in the same order.
#if defined(OCTAVO_HAS_AVX512)

template <class Join>
static inline f32x16 join_lanes(const f32x16* rows, const Join& join) {
  f32x16 half[16];
  __builtin_memcpy(half, rows, sizeof half);
  // Each round combines adjacent lanes and halves the number of vectors: row r ends up in lane r.
  for (int count = 8; count > 0; count /= 2)
    for (int i = 0; i < count; ++i)
      half[i] = join(shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(half[2 * i], half[2 * i + 1]),
                     shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(half[2 * i], half[2 * i + 1]));
  return half[0];
}

static inline f32x16 max_of_each(const f32x16* rows) { return join_lanes(rows, greater); }
static inline f32x16 sum_of_each(const f32x16* rows) {
  return join_lanes(rows, [](f32x16 a, f32x16 b) { return a + b; });
}

#else

static inline f32x16 max_of_each(const f32x16* rows) {
  float result[16];
  for (int row = 0; row < 16; ++row) result[row] = max_of_lanes(rows[row]);
  return load_f32(result);
}

static inline f32x16 sum_of_each(const f32x16* rows) {
  float result[16];
  for (int row = 0; row < 16; ++row) result[row] = sum_of_lanes(rows[row]);
  return load_f32(result);
}

#endif

// State of 16 rows after some spans: weights are 2^(score - max).
struct RowStates {
  f32x16 max = splat(kNothing), sum = splat(0.0f);
};

// Factors on the previous weights and on those of a new span when joined.
struct Shares {
  f32x16 old_share, new_share;
};

static inline Shares join(RowStates& states, f32x16 span_max, f32x16 span_sum) {
  const f32x16 max = greater(span_max, states.max);
  const f32x16 base = select(max == kNothing, splat(0.0f), max);
  const Shares shares = {power_of_two<ToSingle>(states.max - base), power_of_two<ToSingle>(span_max - base)};
  states.sum = states.sum * shares.old_share + span_sum * shares.new_share;
  states.max = max;
  return shares;
}
