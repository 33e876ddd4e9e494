// Argmax over a row's results without storing them. Included inside namespace octavo::OCTAVO_LEVEL, before the linear
// layers.

static inline bool leads(Argmax a, Argmax b) {
  if (b.value != b.value) return false;
  return a.value != a.value || a.value > b.value || (a.value == b.value && a.output < b.output);
}

// Running argmax of one row, in 16 lanes: each holds its maximum and the first output that has it. NaN wins.
struct Leader {
  f32x16 values = splat(-__builtin_inff());
  i32x16 outputs = {};

  // Merges the results of outputs [first, first + 64); outputs from `out_size` on are padding.
  void meet(const f32x16* results, std::int64_t first, std::int64_t out_size) {
    const i32x16 lanes = lane_numbers();
    for (int i = 0; i < 4; ++i) {
      const i32x16 now = lanes + static_cast<std::int32_t>(first + i * 16);
      const i32x16 is_nan = results[i] != results[i], is_larger = results[i] > values;
      const i32x16 takes = (is_nan | is_larger) & (now < static_cast<std::int32_t>(out_size));
      values = (f32x16)(((i32x16)results[i] & takes) | ((i32x16)values & ~takes));
      outputs = (now & takes) | (outputs & ~takes);
    }
  }

  Argmax argmax() const {
    Argmax best = {values[0], outputs[0]};
    for (int lane = 1; lane < 16; ++lane) {
      const Argmax other = {values[lane], outputs[lane]};
      if (leads(other, best)) best = other;
    }
    return best;
  }
};
