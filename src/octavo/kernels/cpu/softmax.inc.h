// Softmax in pieces. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Scores of one row over a span of positions become weights relative to the span's own maximum; spans are then joined
// in order. So a span's part of the answer is the same wherever it is computed. Milakov and Gimelshein 2018,
// arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135.

constexpr float kNothing = -__builtin_inff();  // the score of a position that is not seen

// 2^x for x <= 0 to 2 units in the last place; exactly 0 below -126, NaN for NaN. x = n + f with |f| <= 1/2, and 2^f by
// its Taylor polynomial of degree 6 (remainder below 2e-8).
static inline f32x16 power_of_two(f32x16 x) {
  const f32x16 low = splat(-126.0f), shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const i32x16 is_low = x < low;
  const f32x16 bounded = is_low ? low : x;
  const f32x16 shifted = bounded + shift;
  const f32x16 f = bounded - (shifted - shift);
  f32x16 p = splat(1.54035304e-4f);
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  const f32x16 result = p * (f32x16)(((i32x16)shifted - (i32x16)shift + 127) << 23);
  return (f32x16)((i32x16)result & ~is_low);
}

static inline f32x16 greater(f32x16 a, f32x16 b) { return a > b ? a : b; }

// What is known of 16 rows after some spans: weights are 2^(score - max).
struct RowStates {
  f32x16 max = splat(kNothing), sum = splat(0.0f);
};

// How much the weights so far, and those of a new span, count once they are joined.
struct Shares {
  f32x16 old_share, new_share;
};

static inline Shares join(RowStates& states, f32x16 span_max, f32x16 span_sum) {
  const f32x16 max = greater(span_max, states.max);
  const f32x16 base = max == kNothing ? splat(0.0f) : max;
  const Shares shares = {power_of_two(states.max - base), power_of_two(span_max - base)};
  states.sum = states.sum * shares.old_share + span_sum * shares.new_share;
  states.max = max;
  return shares;
}
