// Maps with integer weights of every form under sanitizers, at every level that this machine has: quantized, packed and
// multiplied beside plain loops over 64-bit integers and doubles, few and many rows, odd sizes, buffers of exactly the size
// that they need. `make sanitize` builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "integer_weight.h"
#include "levels.h"
#include "numbers.h"
#include "ops.h"

using namespace octavo;

namespace {

constexpr double kFloatStep = 0x1p-24, kHalfStep = 0x1p-8;  // relative errors of one rounding; the last, of bf16, doubled

struct Sizes {
  std::int64_t rows, in_size, out_size;
};

// A result in double precision, and by how much one in float32 may differ from it.
struct Expected {
  double value, error;
};

// A row of activations as kernels are to see it.
struct IntegerRow {
  std::vector<std::int64_t> values;
  double scale;
};

IntegerRow integers_of(const bf16* x, std::int64_t size, const Integers& form) {
  const std::vector<float> floats = floats_of(x, size, form);
  float largest = 0.0f;
  for (const float value : floats) largest = std::fmax(largest, std::fabs(value));
  const float inverse = largest == 0.0f ? 0.0f : 127.0f / largest;
  IntegerRow row{{}, largest / 127.0f};
  for (const float value : floats) row.values.push_back(std::lrint(value * inverse));
  return row;
}

Expected product(const IntegerRow& x, const IntegerWeight& weight, std::int64_t output) {
  double value = 0.0, magnitude = 0.0;
  for (std::int64_t group = 0; group < weight.num_groups(); ++group) {
    std::int64_t sum = 0, row_sum = 0;
    for (std::int64_t k = weight.begin_of(group); k < weight.begin_of(group + 1); ++k) {
      sum += x.values[k] * weight.integer(output, k);
      row_sum += x.values[k];
    }
    const double scaled = weight.scale(output, group) * static_cast<double>(sum);
    const double offset = weight.offset(output, group) * static_cast<double>(row_sum);
    value += scaled + offset, magnitude += std::fabs(scaled) + std::fabs(offset);
  }
  const double bias = weight.bias[output];
  magnitude = magnitude * x.scale + std::fabs(bias);
  const auto num_roundings = static_cast<double>(4 * weight.num_groups() + 4);
  return {value * x.scale + bias, magnitude * num_roundings * kFloatStep};
}

// silu(gate) * up, of values that are rounded to bf16 before, between and after.
Expected gated(const Expected& gate, const Expected& up) {
  const double activated = gate.value / (1.0 + std::exp(-gate.value));
  const double gate_error = gate.error + std::fabs(gate.value) * kHalfStep, up_error = up.error + std::fabs(up.value) * kHalfStep;
  // silu's slope is at most 1.1.
  const double error = (std::fabs(up.value) + up_error) * 1.1 * gate_error + std::fabs(activated) * up_error;
  return {activated * up.value, error + std::fabs(activated * up.value) * 2.0 * kHalfStep};
}

class Trial {
 public:
  Trial(const Ops& ops, Pool& pool, const Integers& form, bool has_offsets, Sizes sizes, std::mt19937& source)
      : ops_(ops), pool_(pool), form_(form), has_offsets_(has_offsets), sizes_(sizes), source_(source) {}

  // These say which check failed; null if all is well.

  const char* run_product() {
    make_rows();
    const IntegerWeight plain = weight(sizes_.in_size, sizes_.out_size, false);
    const PackedIntegers map = plain.packed(ops_, pool_);
    if (!is_product(plain, map.weight())) return "a product is wrong";
    return is_alone_as_among_others(map.weight()) ? nullptr : "a row depends on others";
  }

  const char* run_all() {
    if (const char* fault = run_product()) return fault;
    const auto [rows, in_size, out_size] = sizes_;
    const IntegerWeight plain = weight(in_size, out_size, false), gate_up = weight(in_size, out_size, true);
    const IntegerWeight down = weight(out_size, in_size, false);
    const PackedIntegers map = plain.packed(ops_, pool_), pair = gate_up.packed(ops_, pool_), last = down.packed(ops_, pool_);
    if (!is_gated_product(gate_up, pair.weight())) return "a gated product is wrong";
    if (!is_mlp_its_linears(pair.weight(), last.weight())) return "an MLP is not its linears";
    if (!is_normalized_first(map.weight())) return "a norm in a map is not the norm before it";
    return spoils_only_itself(map.weight()) ? nullptr : "a row that is not finite spoils others, or not itself";
  }

 private:
  void make_rows() {
    x_ = random_halves(sizes_.rows * sizes_.in_size, source_);
    std::fill_n(x_.begin() + random_below(sizes_.rows, source_) * sizes_.in_size, sizes_.in_size, bf16{0});
  }

  IntegerWeight weight(std::int64_t in_size, std::int64_t out_size, bool is_gated) {
    return IntegerWeight::random(form_, has_offsets_, in_size, out_size, is_gated, source_);
  }

  RowsArgs all_rows() const { return {x_.data(), sizes_.rows, sizes_.in_size}; }

  std::vector<float> wide(const RowsArgs& rows, const PackedWeight& packed) {
    std::vector<float> out(rows.rows * packed.out_size);
    ops_.integers_bfloat16.linear(LinearArgs{rows, packed, Output::float32, out.data()}, pool_);
    return out;
  }

  std::vector<bf16> narrow(const RowsArgs& rows, const PackedWeight& packed, Output output) {
    std::vector<bf16> out(rows.rows * packed.out_size);
    ops_.integers_bfloat16.linear(LinearArgs{rows, packed, output, out.data()}, pool_);
    return out;
  }

  // Of many results, some are looked at.
  bool is_looked_at() { return random_below(1 + sizes_.rows * sizes_.out_size / 4096, source_) == 0; }

  bool is_product(const IntegerWeight& weight, const PackedWeight& packed) {
    const std::vector<float> out = wide(all_rows(), packed);
    const std::vector<bf16> halves = narrow(all_rows(), packed, Output::plain);
    std::vector<Argmax> largest(sizes_.rows);
    ops_.integers_bfloat16.argmax(ArgmaxArgs{all_rows(), packed, largest.data()}, pool_);
    bool is_well = true;
    for (std::int64_t row = 0; row < sizes_.rows; ++row) {
      const float* logits = out.data() + row * sizes_.out_size;
      const std::int64_t first = std::max_element(logits, logits + sizes_.out_size) - logits;
      is_well &= largest[row].output == first && largest[row].value == logits[first];
      const IntegerRow integers = integers_of(x_.data() + row * sizes_.in_size, sizes_.in_size, weight.form);
      for (std::int64_t output = 0; output < sizes_.out_size; ++output) {
        if (!is_looked_at()) continue;
        const Expected expected = product(integers, weight, output);
        const std::int64_t at = row * sizes_.out_size + output;
        is_well &= std::fabs(out[at] - expected.value) <= expected.error && halves[at] == to_bf16(out[at]);
      }
    }
    return is_well;
  }

  bool is_gated_product(const IntegerWeight& weight, const PackedWeight& packed) {
    const std::vector<bf16> out = narrow(all_rows(), packed, Output::gated);
    bool is_well = true;
    for (std::int64_t row = 0; row < sizes_.rows; ++row) {
      const IntegerRow integers = integers_of(x_.data() + row * sizes_.in_size, sizes_.in_size, weight.form);
      for (std::int64_t output = 0; output < sizes_.out_size; ++output) {
        if (!is_looked_at()) continue;
        const Expected expected =
            gated(product(integers, weight, output), product(integers, weight, sizes_.out_size + output));
        is_well &= std::fabs(widened(out[row * sizes_.out_size + output]) - expected.value) <= expected.error;
      }
    }
    return is_well;
  }

  bool is_alone_as_among_others(const PackedWeight& packed) {
    const std::vector<float> out = wide(all_rows(), packed);
    bool is_well = true;
    for (const std::int64_t most : {1, 3, 18}) {
      const std::int64_t count = std::min(most, sizes_.rows), first = random_below(sizes_.rows - count + 1, source_);
      RowsArgs some = all_rows();
      some.x = static_cast<const bf16*>(some.x) + first * sizes_.in_size, some.rows = count;
      const std::vector<float> alone = wide(some, packed);
      is_well &= std::equal(alone.begin(), alone.end(), out.begin() + first * sizes_.out_size);
    }
    return is_well;
  }

  bool is_mlp_its_linears(const PackedWeight& gate_up, const PackedWeight& down) {
    std::vector<bf16> whole(sizes_.rows * sizes_.in_size);
    ops_.integers_bfloat16.mlp(MlpArgs{all_rows(), gate_up, down, whole.data()}, pool_);
    const std::vector<bf16> middle = narrow(all_rows(), gate_up, Output::gated);
    return whole == narrow({middle.data(), sizes_.rows, sizes_.out_size}, down, Output::plain);
  }

  bool is_normalized_first(const PackedWeight& packed) {
    const auto residual = random_halves(static_cast<std::int64_t>(x_.size()), source_);
    const auto norm_weight = random_halves(sizes_.in_size, source_);
    std::vector<bf16> total(x_.size()), normalized(x_.size());
    RowsArgs rows = all_rows();
    rows.fused = {.residual = residual.data(), .norm_weight = norm_weight.data(), .eps = 1e-5f};
    rows.total = total.data();
    const std::vector<float> at_once = wide(rows, packed);
    ops_.bfloat16.rms_norm(NormArgs{rows, normalized.data()}, pool_);
    RowsArgs after = all_rows();
    after.x = normalized.data();
    return at_once == wide(after, packed);
  }

  bool spoils_only_itself(const PackedWeight& packed) {
    const std::vector<float> before = wide(all_rows(), packed);
    const std::int64_t spoilt = random_below(sizes_.rows, source_);
    x_[spoilt * sizes_.in_size + random_below(sizes_.in_size, source_)] = 0x7f80;  // infinity
    const std::vector<float> after = wide(all_rows(), packed);
    bool is_well = true;
    for (std::int64_t row = 0; row < sizes_.rows; ++row)
      for (std::int64_t at = row * sizes_.out_size; at < (row + 1) * sizes_.out_size; ++at)
        is_well &= row == spoilt ? std::isnan(after[at]) : after[at] == before[at];
    return is_well;
  }

  const Ops& ops_;
  Pool& pool_;
  Integers form_;
  bool has_offsets_;
  Sizes sizes_;
  std::mt19937& source_;
  std::vector<bf16> x_;
};

// A weight of random numbers becomes integers, and is packed as those are.
const char* check_quantizing(const Ops& ops, Pool& pool, const Integers& form, std::mt19937& source) {
  for (const bool is_gated : {false, true}) {
    const std::int64_t in_size = 1 + random_below(300, source), out_size = 1 + random_below(70, source);
    auto wide = random_halves(out_size * (is_gated ? 2 : 1) * in_size, source);
    std::fill_n(wide.begin() + random_below(out_size, source) * in_size, in_size, bf16{0});
    const IntegerWeight weight = IntegerWeight::quantized(ops, pool, form, wide, in_size, out_size, is_gated);
    if (!weight.is_near(wide)) return "integers are not near the weight";
    const PackedIntegers at_once = weight.packed_from(wide.data(), ops, pool), after = weight.packed(ops, pool);
    if (at_once.values != after.values || at_once.scales != after.scales) return "a weight is packed otherwise than its integers";
  }
  return nullptr;
}

const char* check_structured_output(const Ops& ops, Pool& pool, const Integers& form, std::mt19937& source) {
  if (const char* fault = check_quantizing(ops, pool, form, source)) return fault;
  for (int trial = 0; trial < 7; ++trial) {
    const std::int64_t max_rows = trial % 3 ? 70 : 5;
    const Sizes sizes{1 + random_below(max_rows, source), 1 + random_below(300, source), 1 + random_below(200, source)};
    if (const char* fault = Trial(ops, pool, form, trial % 2 == 1, sizes, source).run_all()) return fault;
  }
  // Several blocks of rows; and blocks of k that meet several panels.
  for (const Sizes& sizes : {Sizes{530, 300, 90}, Sizes{270, 3300, 100}})
    if (const char* fault = Trial(ops, pool, form, source() % 2 == 1, sizes, source).run_product()) return fault;
  return nullptr;
}

bool check(const Ops& ops) {
  std::mt19937 source(1);
  Pool pool(3);
  std::vector<Integers> forms{make_form(4, 0, true), make_form(4, 0, true, true), make_form(8, 0, false, true)};
  for (const int bits : {8, 4})
    for (const std::int64_t group_size : {0, 32, 64, 128}) forms.push_back(make_form(bits, group_size, false));
  bool is_well = true;
  for (const Integers& form : forms)
    if (const char* fault = check_structured_output(ops, pool, form, source)) {
      is_well = false;
      std::printf("%s: %d bits%s%s, groups of %d: %s\n", ops.name, form.bits, form.is_two_level ? " nested" : "",
                  form.is_rotated ? " rotated" : "", static_cast<int>(form.group_size), fault);
    }
  std::printf("%s: integers are %s\n", ops.name, is_well ? "well" : "wrong");
  return is_well;
}

}  // namespace

int main(int count, char** names) { return check_levels(count, names, check); }
