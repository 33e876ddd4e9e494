// Rounds weights to two-level integers, 16 outputs at a time, one in each lane. Included inside namespace
// octavo::OCTAVO_LEVEL.
//
// Errors of a block of 64 inputs are fed back to its later inputs: error_feedback.cpp. Everything is exact in floats, fused
// or not, in any order, so all levels choose the same integers: in steps of 8 bits, weights are multiples of 1/16 up to 127,
// errors multiples of 1/16 up to 64, feedback multiples of 1/128 up to 2. A sum of a weight and 63 products is a multiple
// of 2^-11 below 2^13: 24 bits.

constexpr std::int64_t kStrip = 16;  // outputs

static inline f32x16 round_to_sixteenths(f32x16 value) { return round_to_integers(value * 16.0f) * 0.0625f; }

static inline f32x16 nearest_4_bits(f32x16 value, f32x16 inverse) { return bounded(round_to_integers(value * inverse), -8.0f, 7.0f); }

// (q * m + 4) >> 3: q * m / 8 is a multiple of 1/8, so that no tie is left. Not fused in the portable level: exact either way.
static inline f32x16 meant_by(f32x16 q, f32x16 eighths) { return round_to_integers(q * eighths + 0.0625f); }

static inline f32x16 inverse_of(f32x16 multiplier) {
  return select(multiplier == 0.0f, splat(0.0f), splat(8.0f) / select(multiplier == 0.0f, splat(1.0f), multiplier));
}

// The multipliers of a group: the value of largest magnitude becomes -6.5 ... -10 (clipped at -8); of these, the one with the
// least squared error, and of equals the first. Squares are bounded by 2^10, so that sums of them are exact.
static inline f32x16 best_multipliers(const float (*group)[kStrip]) {
  f32x16 values[kTwoLevelGroup], low = splat(0.0f), high = splat(0.0f);
  for (std::int64_t k = 0; k < kTwoLevelGroup; ++k) {
    values[k] = round_to_sixteenths(load_f32(group[k]));
    low = select(values[k] < low, values[k], low);
    high = select(values[k] > high, values[k], high);
  }
  const f32x16 extreme = select(-low > high, low, high);
  f32x16 best = splat(0.0f), least = splat(__builtin_inff());
  for (const float reach : {8.0f, 6.5f, 7.0f, 7.5f, 8.5f, 9.0f, 9.5f, 10.0f}) {
    const f32x16 wanted = extreme * -8.0f / splat(reach), size = select(wanted < 0.0f, -wanted, wanted) + 0.5f;
    const f32x16 rounded = convert<f32x16>(convert<i32x16>(select(size < 127.0f, size, splat(127.0f))));
    const f32x16 multiplier = select(wanted < 0.0f, -rounded, rounded);
    const f32x16 inverse = inverse_of(multiplier), eighths = multiplier * 0.125f;
    f32x16 error = splat(0.0f);
    for (const f32x16& value : values) {
      const f32x16 missed = value - meant_by(nearest_4_bits(value, inverse), eighths), square = missed * missed;
      error = error + select(square < 1024.0f, square, splat(1024.0f));
    }
    // A multiplier of zero: the whole group is negligible next to the output's largest weight.
    const f32x16 counted = select(multiplier == 0.0f, splat(__builtin_inff()), error);
    best = select(counted < least, multiplier, best);
    least = select(counted < least, counted, least);
  }
  return best;
}

// One block of 16 outputs while it is rounded, input by input.
struct RoundedBlock {
  float weights[kTileK][kStrip], errors[kTileK][kStrip];
  std::int32_t values[kTileK][kStrip];
  std::int32_t multipliers[kTileK / kTwoLevelGroup][kStrip];
};

// The weight of input k with what errors of inputs first ... last - 1 feed back; feedback: of k.
static inline f32x16 fed_back(const RoundedBlock& block, f32x16 weight, const float* feedback, std::int64_t first, std::int64_t last) {
  f32x16 sums[4] = {weight, splat(0.0f), splat(0.0f), splat(0.0f)};  // independent: a sum waits for the one before it
  std::int64_t i = first;
  for (; i + 4 <= last; i += 4)
    for (int part = 0; part < 4; ++part) sums[part] += load_f32(block.errors[i + part]) * feedback[i + part];
  for (; i < last; ++i) sums[0] += load_f32(block.errors[i]) * feedback[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// feedback: [64][64]; null: none.
static inline void round_block(RoundedBlock& block, const float* feedback) {
  for (std::int64_t first = 0; first < kTileK; first += kTwoLevelGroup) {
    const std::int64_t stop = first + kTwoLevelGroup;
    float group[kTwoLevelGroup][kStrip];
    for (std::int64_t k = first; k < stop; ++k) {
      const f32x16 weight = load_f32(block.weights[k]);
      store_f32(group[k - first], feedback ? fed_back(block, weight, feedback + k * kTileK, 0, first) : weight);
    }
    const f32x16 multiplier = best_multipliers(group), inverse = inverse_of(multiplier), eighths = multiplier * 0.125f;
    store(block.multipliers[first / kTwoLevelGroup], convert<i32x16>(multiplier));
    for (std::int64_t k = first; k < stop; ++k) {
      const f32x16 before = load_f32(group[k - first]);
      const f32x16 wanted = feedback ? fed_back(block, before, feedback + k * kTileK, first, k) : before;
      const f32x16 q = nearest_4_bits(wanted, inverse);
      store(block.values[k], convert<i32x16>(q));
      store_f32(block.errors[k], bounded(load_f32(block.weights[k]) - meant_by(q, eighths), -64.0f, 64.0f));
    }
  }
}

// Where some outputs' integers go, one output behind the other.
struct OutputIntegers {
  std::int8_t *values, *multipliers;
  float* scales;
};

// Outputs [K] as two-level integers, at most 16, from `widen_output`: wide [count][wide size].
static inline void round_outputs(const PackIntegersArgs& args, std::int64_t count, const float* wide, const float* feedback,
                                 const OutputIntegers& to) {
  const std::int64_t in_size = args.in_size, padded = wide_size(args), num_multipliers = ceil_div(in_size, kTwoLevelGroup);
  float inverses[kStrip];
  for (std::int64_t lane = 0; lane < count; ++lane) {
    const float largest = __builtin_fabsf(farthest_from_zero(wide + lane * padded, in_size));
    to.scales[lane] = largest < 1e-30f ? 0.0f : largest / 127.0f;
    inverses[lane] = largest < 1e-30f ? 0.0f : 127.0f / largest;
  }
  RoundedBlock block = {};
  for (std::int64_t start = 0; start < in_size; start += kTileK) {
    for (std::int64_t lane = 0; lane < count; ++lane)
      for (std::int64_t k = 0; k < kTileK; k += 16) {
        float values[16];
        store_f32(values, round_to_sixteenths(load_f32(wide + lane * padded + start + k) * inverses[lane]));
        for (int i = 0; i < 16; ++i) block.weights[k + i][lane] = values[i];
      }
    const bool is_rotated = args.form.is_rotated && start + kTileK <= in_size;
    round_block(block, is_rotated ? feedback + start * kTileK : nullptr);
    const std::int64_t num_inputs = smaller(kTileK, in_size - start);
    for (std::int64_t lane = 0; lane < count; ++lane) {
      std::int8_t* values = to.values + lane * in_size + start;
      for (std::int64_t k = 0; k < num_inputs; ++k) values[k] = static_cast<std::int8_t>(block.values[k][lane]);
      std::int8_t* multipliers = to.multipliers + lane * num_multipliers + start / kTwoLevelGroup;
      for (std::int64_t group = 0; group < ceil_div(num_inputs, kTwoLevelGroup); ++group)
        multipliers[group] = static_cast<std::int8_t>(block.multipliers[group][lane]);
    }
  }
}
