// Linear maps, the MLP and norms under address and undefined-behaviour sanitizers, at every level that this machine has,
// in odd sizes and buffers of exactly the size that they need. `make sanitize` builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "level.h"
#include "ops.h"
#include "packed.h"

using namespace octavo;

namespace {

bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double widened(bf16 half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Sizes {
  std::int64_t rows, in_size, out_size;
};

class Trial {
 public:
  Trial(const Ops& ops, Pool& pool, Sizes sizes, std::mt19937& source)
      : ops_(ops), pool_(pool), sizes_(sizes), source_(source) {}

  // Runs all ops; returns the greatest error of a map beside sums in double precision.
  double run() {
    const auto [rows, in_size, out_size] = sizes_;
    const auto x = numbers(rows * in_size), residual = numbers(rows * in_size), norm = numbers(in_size);
    const auto weight = numbers(out_size * in_size);
    const auto map = packed(weight, in_size, out_size, false);
    const auto gate_up = packed(numbers(2 * out_size * in_size), in_size, out_size, true);
    const auto down = packed(numbers(in_size * out_size), out_size, in_size, false);
    std::vector<bf16> total(rows * in_size), out(rows * out_size), back(rows * in_size);
    std::vector<float> wide(rows * out_size);
    const RowsArgs plain{x.data(), rows, in_size, nullptr, nullptr, 0.0f, nullptr};
    const RowsArgs normed{x.data(), rows, in_size, residual.data(), norm.data(), 1e-5f, total.data()};
    ops_.linear(LinearArgs{plain, {out_size, map.data(), nullptr}, Output::float32, wide.data()}, pool_);
    std::vector<Largest> largest(rows);
    ops_.largest(LargestArgs{plain, {out_size, map.data(), nullptr}, largest.data()}, pool_);
    ops_.linear(LinearArgs{normed, {out_size, map.data(), nullptr}, Output::bf16, out.data()}, pool_);
    ops_.linear(LinearArgs{plain, {out_size, gate_up.data(), nullptr}, Output::gated, out.data()}, pool_);
    ops_.mlp(MlpArgs{normed, {out_size, gate_up.data(), nullptr}, {in_size, down.data(), nullptr}, back.data()}, pool_);
    ops_.rms_norm(NormArgs{normed, back.data()}, pool_);
    double worst = 0.0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* logits = wide.data() + row * out_size;
      const std::int64_t first = std::max_element(logits, logits + out_size) - logits;
      if (largest[row].output != first || largest[row].value != logits[first]) worst = HUGE_VAL;
    }
    for (int sample = 0; sample < 20; ++sample) {
      const std::int64_t row = source_() % rows, output = source_() % out_size;
      double sum = 0.0;
      for (std::int64_t k = 0; k < in_size; ++k)
        sum += widened(x[row * in_size + k]) * widened(weight[output * in_size + k]);
      worst = std::fmax(worst, std::fabs(sum - wide[row * out_size + output]));
    }
    return worst;
  }

 private:
  std::vector<bf16> numbers(std::int64_t count) {
    std::uniform_real_distribution<float> distribution(-1.0f, 1.0f);
    std::vector<bf16> result(count);
    for (bf16& value : result) value = to_bf16(distribution(source_));
    return result;
  }

  std::vector<bf16> packed(const std::vector<bf16>& weight, std::int64_t in_size, std::int64_t out_size, bool is_gated) {
    return packed_weight(ops_, pool_, weight, in_size, out_size, is_gated);
  }

  const Ops& ops_;
  Pool& pool_;
  Sizes sizes_;
  std::mt19937& source_;
};

bool check(const Ops& ops) {
  std::mt19937 source(1);
  Pool pool(3);
  double worst = 0.0;
  for (int trial = 0; trial < 60; ++trial) {
    const std::int64_t most_rows = trial % 3 ? 40 : 200;
    Sizes sizes{1 + source() % most_rows, 1 + source() % 300, 1 + source() % 200};
    if (trial % 20 == 19) sizes = {600, 1100, 600};  // several blocks of rows, of k and of panels
    worst = std::fmax(worst, Trial(ops, pool, sizes, source).run());
  }
  std::printf("%s: greatest error %.1e\n", ops.name, worst);
  return worst < 1e-4;
}

}  // namespace

int main() {
  bool is_well = check(ops_portable);
#if defined(__x86_64__)
  const Level best = best_level();
  if (best >= Level::avx2) is_well &= check(ops_avx2);
  if (best >= Level::avx512) is_well &= check(ops_avx512);
  if (best >= Level::amx) is_well &= check(ops_amx);
#endif
  return is_well ? 0 : 1;
}
