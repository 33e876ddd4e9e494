// How two-level rounding shapes its errors: which inputs matter, and what later inputs take over of an error. The same at
// every level, compiled without fused products: the same bits on every processor.
//
// A few inputs of a language model's layers are far larger than the rest, and an error of their weights costs as much
// more. No activations are known at load. But training makes weights of large inputs sparse: in such a column most are near
// zero and a few are not. So an input counts by r^6, r = mean(w^2) / mean(|w|)^2 of its column, which is pi / 2 for a normal
// distribution. A logits head is often the table of embeddings, too, from which the residual stream has its large inputs:
// there an input counts by mean(w^2).
//
// Rotation spreads each input over its block of 64. The cost of errors e of a rotated block is then e^T H e, with H the
// rotated diagonal of what inputs count. With H = M^T D M and M unit lower triangular, it is the sum over k of
// D_k (e_k + sum over i < k of M_ki e_i)^2: so k is rounded such that its own error is near minus that sum, as in GPTQ (Frantar
// et al. 2022, arXiv:2210.17323), but without data. `feedback` is M below its diagonal.
#include <cmath>
#include <cstring>

#include "ops.h"

namespace octavo {
namespace {

constexpr std::int64_t kBlock = 64;
constexpr float kSteps = 2047.0f;    // of the largest weight
constexpr double kMostSparse = 8.0;  // r
// Multiples of 1/128 and at most 2: sums of their products with errors are exact in floats, see integer_rounding.inc.h.
constexpr double kUnits = 128.0, kMostUnits = 256.0;

// A magnitude of the weight's dtype; infinity of float16 becomes 65,536.
float value_of(const PackIntegersArgs& args, int bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << (args.is_float16 ? 13 : 16);
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return args.is_float16 ? value * 0x1p112f : value;  // the exponents of float16 have another bias
}

const std::uint16_t* row_of(const PackIntegersArgs& args, std::int64_t row) {
  return static_cast<const std::uint16_t*>(args.weight) + row * args.in_size;
}

// The largest magnitude of some weights: the order of positive floats is that of their bits.
std::int16_t largest_of(const std::uint16_t* weights, std::int64_t count) {
  std::int16_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int16_t magnitude = static_cast<std::int16_t>(weights[i] & 0x7fff);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// What the inputs of a block count. Weights are rounded to multiples of 1 / steps, so that sums are exact in any order.
void weigh_inputs(const PackIntegersArgs& args, std::int64_t first_input, float steps, double* importance) {
  const std::int64_t num_rows = args.out_size * (args.is_gated ? 2 : 1);
  double sums[kBlock] = {}, squares[kBlock] = {};
  for (std::int64_t start = 0; start < num_rows; start += 256) {  // 256 squares of 2047 are less than 2^30
    std::int32_t part_sums[kBlock] = {}, part_squares[kBlock] = {};
    for (std::int64_t row = start; row < num_rows && row < start + 256; ++row) {
      const std::uint16_t* weights = row_of(args, row) + first_input;
      for (std::int64_t k = 0; k < kBlock; ++k) {
        // Rounded to nearest, ties to even, by a sum that leaves no bits for fractions.
        const float rounded = value_of(args, weights[k] & 0x7fff) * steps + 12582912.0f - 12582912.0f;
        const std::int32_t value = static_cast<std::int32_t>(rounded < kSteps ? rounded : kSteps);  // NaN is no integer
        part_sums[k] += value, part_squares[k] += value * value;
      }
    }
    for (std::int64_t k = 0; k < kBlock; ++k) sums[k] += part_sums[k], squares[k] += part_squares[k];
  }
  const double least = static_cast<double>(num_rows);  // a step for each output
  for (std::int64_t k = 0; k < kBlock; ++k) {
    if (args.is_logits_head) {
      importance[k] = squares[k] < least ? least : squares[k];
      continue;
    }
    const double sparsity = sums[k] > 0.0 ? least * squares[k] / (sums[k] * sums[k]) : 1.0;
    const double bounded = sparsity < kMostSparse ? sparsity : kMostSparse, cube = bounded * bounded * bounded;
    importance[k] = cube * cube;
  }
}

// M below its diagonal, [64][64], from what inputs count.
void factor_block(double* importance, float* feedback) {
  // Of two rotated inputs, H depends on the exclusive or of their numbers alone.
  for (std::int64_t step = 1; step < kBlock; step *= 2)
    for (std::int64_t k = 0; k < kBlock; ++k)
      if (!(k & step)) {
        const double first = importance[k], second = importance[k + step];
        importance[k] = first + second, importance[k + step] = first - second;
      }
  double h[kBlock][kBlock];
  for (std::int64_t i = 0; i < kBlock; ++i)
    for (std::int64_t j = 0; j < kBlock; ++j) h[i][j] = importance[i ^ j];
  for (std::int64_t k = kBlock - 1; k >= 0; --k)
    for (std::int64_t i = 0; i < k; ++i) {
      const double share = h[k][i] / h[k][k], units = std::nearbyint(share * kUnits);
      const double bounded = units < -kMostUnits ? -kMostUnits : units > kMostUnits ? kMostUnits : units;
      feedback[k * kBlock + i] = static_cast<float>(bounded / kUnits);
      for (std::int64_t j = 0; j <= i; ++j) h[i][j] -= share * h[k][j];
    }
}

}  // namespace

const float* error_feedback(const PackIntegersArgs& args, Pool& pool) {
  const std::int64_t num_blocks = args.in_size / kBlock, num_rows = args.out_size * (args.is_gated ? 2 : 1);
  const std::int64_t together = (num_rows + 1023) / 1024, num_chunks = (num_rows + together - 1) / together;
  const std::size_t num_bytes = static_cast<std::size_t>(num_blocks * kBlock * kBlock) * sizeof(float);
  float* feedback = static_cast<float*>(pool.scratch().bytes(num_bytes + static_cast<std::size_t>(num_chunks) * sizeof(std::int16_t)));
  std::int16_t* largest = reinterpret_cast<std::int16_t*>(feedback + num_blocks * kBlock * kBlock);
  pool.run(num_chunks, [&](std::int64_t chunk) {
    const std::int64_t rows = num_rows - chunk * together < together ? num_rows - chunk * together : together;
    largest[chunk] = largest_of(row_of(args, chunk * together), rows * args.in_size);
  });
  std::int16_t largest_of_all = 0;
  for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk)
    largest_of_all = largest[chunk] > largest_of_all ? largest[chunk] : largest_of_all;
  const float most = value_of(args, largest_of_all), steps = most < 1e-30f ? 0.0f : kSteps / most;
  std::memset(feedback, 0, num_bytes);
  pool.run(num_blocks, [&](std::int64_t block) {
    double importance[kBlock];
    weigh_inputs(args, block * kBlock, steps, importance);
    factor_block(importance, feedback + block * kBlock * kBlock);
  });
  return feedback;
}

}  // namespace octavo
