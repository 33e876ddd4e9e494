// A weight as integers, as plain loops read them, and packed in memory of exactly the size that it needs.
#pragma once
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "numbers.h"
#include "ops.h"

inline octavo::Integers make_form(int bits, std::int64_t group_size, bool is_two_level, bool is_rotated = false) {
  return {bits, is_two_level, group_size, nullptr, nullptr, nullptr, is_rotated, is_rotated && !is_two_level};
}

// A row in floats, rotated as its form is.
inline std::vector<float> floats_of(const octavo::bf16* x, std::int64_t size, const octavo::Integers& form) {
  std::vector<float> row;
  for (std::int64_t k = 0; k < size; ++k) row.push_back(widened(x[k]));
  const std::int64_t num_rotated = form.is_rotated ? size / 64 * 64 : 0;
  std::int64_t step = 1;
  for (; !form.mixes_blocks ? step < 64 : num_rotated / step % 2 == 0 && step < num_rotated; step *= 2)
    for (std::int64_t k = 0; k < num_rotated; ++k) {
      if (k & step) continue;
      const float first = row[k], second = row[k + step];
      row[k] = first + second, row[k + step] = first - second;
    }
  double length = std::sqrt(static_cast<double>(step) / 64);
  for (; form.mixes_blocks && num_rotated > step && num_rotated / step % 3 == 0; step *= 3, length *= 3.0)
    for (std::int64_t k = 0; k < num_rotated; ++k) {
      if (k / step % 3 != 0) continue;
      const float sum = row[k] + row[k + step] + row[k + 2 * step];
      for (int i = 0; i < 3; ++i) row[k + i * step] = 2.0f * sum - 3.0f * row[k + i * step];
    }
  const float scale = 0.125f * static_cast<float>(1.0 / length);  // rounded as the kernels round it: integers must be the same
  for (std::int64_t k = 0; k < num_rotated; ++k) row[k] *= scale;
  return row;
}

struct PackedIntegers {
  octavo::Integers form;
  std::int64_t out_size;
  std::vector<std::uint8_t> values;
  std::vector<float> scales, offsets, bias;

  octavo::PackedWeight weight() const {
    octavo::Integers integers = form;
    integers.values = values.data(), integers.scales = scales.data();
    integers.offsets = offsets.empty() ? nullptr : offsets.data();
    return {out_size, nullptr, bias.data(), integers};
  }
};

struct IntegerWeight {
  octavo::Integers form;
  std::int64_t in_size, out_size;  // K; N, or I where it is gated
  bool is_gated;
  std::vector<std::int8_t> values, multipliers;  // [N or 2 * I, K], [N or 2 * I, ceil(K / 32)]
  std::vector<float> scales, offsets, bias;      // [N or 2 * I, groups] twice, [N or 2 * I]

  // Integers of the whole range.
  static IntegerWeight random(const octavo::Integers& form, bool has_offsets, std::int64_t in_size, std::int64_t out_size,
                              bool is_gated, std::mt19937& source) {
    IntegerWeight result = sized(form, in_size, out_size, is_gated);
    const int most = form.bits == 8 ? 127 : 7, least = form.bits == 8 ? -127 : -8;
    std::uniform_int_distribution<int> integers(least, most), multipliers(-127, 127);
    std::uniform_real_distribution<float> scales(0.0f, 1.0f / 128);
    for (std::int8_t& value : result.values) value = static_cast<std::int8_t>(integers(source));
    for (std::int8_t& value : result.multipliers) value = static_cast<std::int8_t>(multipliers(source));
    for (float& scale : result.scales) scale = scales(source);
    if (has_offsets) result.offsets = random_floats(static_cast<std::int64_t>(result.scales.size()), source);
    result.bias = random_floats(result.num_rows(), source);
    return result;
  }

  static IntegerWeight quantized(const octavo::Ops& ops, octavo::Pool& pool, const octavo::Integers& form,
                                 const std::vector<octavo::bf16>& weight, std::int64_t in_size, std::int64_t out_size,
                                 bool is_gated) {
    IntegerWeight result = sized(form, in_size, out_size, is_gated);
    octavo::PackIntegersArgs args = result.args();
    args.weight = weight.data();
    ops.quantize(args, pool);
    return result;
  }

  std::int64_t num_rows() const { return out_size * (is_gated ? 2 : 1); }
  std::int64_t num_groups() const { return form.group_size ? (in_size + form.group_size - 1) / form.group_size : 1; }
  std::int64_t num_multipliers() const { return (in_size + 31) / 32; }
  std::int64_t num_panels() const { return (num_rows() + 31) / 32; }
  std::int64_t begin_of(std::int64_t group) const { return group < num_groups() ? group * form.group_size : in_size; }

  std::int64_t integer(std::int64_t row, std::int64_t k) const {
    const int value = values[row * in_size + k];
    if (!form.is_two_level) return value;
    const int product = value * multipliers[row * num_multipliers() + k / 32] + 4;
    return product >= 0 ? product / 8 : -((7 - product) / 8);
  }
  double scale(std::int64_t row, std::int64_t group) const { return scales[row * num_groups() + group]; }
  double offset(std::int64_t row, std::int64_t group) const {
    return offsets.empty() ? 0.0 : offsets[row * num_groups() + group];
  }

  // Whether each group is as near to `weight` as the plainest choice of its scale: the greatest value at the end of the
  // range.
  bool is_near(const std::vector<octavo::bf16>& weight) const {
    bool is_well = true;
    for (std::int64_t row = 0; row < num_rows(); ++row) {
      const std::vector<float> floats = floats_of(weight.data() + row * in_size, in_size, form);
      for (std::int64_t group = 0; group < num_groups(); ++group) {
        double error = 0.0, largest = 0.0;
        for (std::int64_t k = begin_of(group); k < begin_of(group + 1); ++k) {
          const double wanted = floats[k];
          error += std::pow(wanted - scale(row, group) * static_cast<double>(integer(row, k)), 2);
          largest = std::fmax(largest, std::fabs(wanted));
        }
        // Half a step each; on the side that ends at 7 a value may lie a whole one off.
        const double step = largest / (form.bits == 8 ? 127 : 8) * (form.bits == 8 ? 0.5001 : 1.0001);
        // Nested integers are rounded once more, to an eighth of a multiplier and steps of 8 bits.
        const double most = form.is_two_level ? step + largest / 127 : step;
        is_well &= error <= most * most * static_cast<double>(begin_of(group + 1) - begin_of(group));
        is_well &= largest > 0.0 || error == 0.0;
      }
    }
    return is_well;
  }

  PackedIntegers packed(const octavo::Ops& ops, octavo::Pool& pool) const { return packed_from(nullptr, ops, pool); }

  // From `weight`, if there is one, or from the integers.
  PackedIntegers packed_from(const octavo::bf16* weight, const octavo::Ops& ops, octavo::Pool& pool) const {
    const std::int64_t panels = is_gated ? (out_size + 15) / 16 : num_panels(), k_tiles = (in_size + 63) / 64;
    PackedIntegers result{form, out_size, {}, {}, {}, {}};
    result.values.resize(panels * k_tiles * (256 * form.bits + (form.is_two_level ? 64 : 0)));
    result.scales.resize(panels * num_groups() * 32);
    result.offsets.resize(offsets.empty() ? 0 : result.scales.size());
    result.bias = packed_bias(panels);
    IntegerWeight copy = *this;
    octavo::PackIntegersArgs args = copy.args();
    args.weight = weight;
    args.offsets = offsets.empty() ? nullptr : offsets.data();
    args.packed = result.values.data(), args.packed_scales = result.scales.data();
    args.packed_offsets = offsets.empty() ? nullptr : result.offsets.data();
    ops.pack_integers(args, pool);
    return result;
  }

 private:
  static IntegerWeight sized(const octavo::Integers& form, std::int64_t in_size, std::int64_t out_size, bool is_gated) {
    IntegerWeight result{form, in_size, out_size, is_gated, {}, {}, {}, {}, {}};
    result.values.resize(result.num_rows() * in_size);
    result.multipliers.resize(form.is_two_level ? result.num_rows() * result.num_multipliers() : 0);
    result.scales.resize(result.num_rows() * result.num_groups());
    return result;
  }

  octavo::PackIntegersArgs args() {
    octavo::PackIntegersArgs result{};
    result.form = form;
    result.in_size = in_size, result.out_size = out_size, result.is_gated = is_gated;
    result.values = values.data(), result.scales = scales.data();
    result.multipliers = form.is_two_level ? multipliers.data() : nullptr;
    return result;
  }

  // In the order of the panels' outputs; a gated panel has 16 gates, then their ups.
  std::vector<float> packed_bias(std::int64_t panels) const {
    std::vector<float> result(panels * 32);
    for (std::int64_t at = 0; at < panels * 32; ++at) {
      const std::int64_t output = is_gated ? at / 32 * 16 + at % 16 : at;
      const std::int64_t row = is_gated && at % 32 >= 16 ? out_size + output : output;
      if (output < out_size && !bias.empty()) result[at] = bias[row];
    }
    return result;
  }
};
