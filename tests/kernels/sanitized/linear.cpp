// Linears, the MLP and norms, in every dtype, under address and undefined-behavior sanitizers, at every level that
// this machine has, in odd sizes and buffers of exactly the size that they need. `make sanitize` builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "levels.h"
#include "numbers.h"
#include "ops.h"
#include "packed.h"

using namespace octavo;

namespace {

struct Sizes {
  std::int64_t rows, in_size, out_size;
};

template <class Element>
class Trial {
 public:
  Trial(const LayerOps& layer_ops, Pool& pool, Sizes sizes, std::mt19937& source)
      : layer_ops_(layer_ops), pool_(pool), sizes_(sizes), source_(source) {}

  // Runs all ops; returns the greatest error of a map beside sums in double precision, infinity where bits are wrong.
  double run() {
    const auto [rows, in_size, out_size] = sizes_;
    const auto x = numbers(rows * in_size), residual = numbers(rows * in_size), norm = numbers(in_size);
    const auto weight = numbers(out_size * in_size);
    const auto map = packed(weight, in_size, out_size, false);
    const auto gate_up = packed(numbers(2 * out_size * in_size), in_size, out_size, true);
    const auto down = packed(numbers(in_size * out_size), out_size, in_size, false);
    std::vector<Element> total(rows * in_size), out(rows * out_size), back(rows * in_size);
    std::vector<float> wide(rows * out_size);
    const RowsArgs plain{x.data(), rows, in_size};
    const RowsArgs normed{x.data(), rows, in_size, {residual.data(), norm.data(), 1e-5f}, total.data()};
    layer_ops_.linear(LinearArgs{plain, {out_size, map.data(), nullptr}, Output::float32, wide.data()}, pool_);
    std::vector<Argmax> largest(rows);
    layer_ops_.argmax(ArgmaxArgs{plain, {out_size, map.data(), nullptr}, largest.data()}, pool_);
    layer_ops_.linear(LinearArgs{normed, {out_size, map.data(), nullptr}, Output::plain, out.data()}, pool_);
    layer_ops_.linear(LinearArgs{plain, {out_size, gate_up.data(), nullptr}, Output::gated, out.data()}, pool_);
    layer_ops_.mlp(MlpArgs{normed, {out_size, gate_up.data(), nullptr}, {in_size, down.data(), nullptr}, back.data()}, pool_);
    layer_ops_.rms_norm(NormArgs{normed, back.data()}, pool_);
    double worst = 0.0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* logits = wide.data() + row * out_size;
      const std::int64_t first = std::max_element(logits, logits + out_size) - logits;
      if (largest[row].output != first || largest[row].value != logits[first]) worst = HUGE_VAL;
    }
    if (!are_alone_as_among_others(x, map, wide)) worst = HUGE_VAL;
    for (int sample = 0; sample < 20; ++sample) {
      const std::int64_t row = random_below(rows, source_), output = random_below(out_size, source_);
      double sum = 0.0;
      for (std::int64_t k = 0; k < in_size; ++k)
        sum += double{widened(x[row * in_size + k])} * widened(weight[output * in_size + k]);
      worst = std::fmax(worst, std::fabs(sum - wide[row * out_size + output]));
    }
    return worst;
  }

 private:
  bool are_alone_as_among_others(const std::vector<Element>& x, const std::vector<Element>& map, const std::vector<float>& among) {
    const auto [rows, in_size, out_size] = sizes_;
    bool is_well = true;
    for (const std::int64_t most : {1, 3, 18}) {
      const std::int64_t count = std::min(most, rows), first = random_below(rows - count + 1, source_);
      std::vector<float> alone(count * out_size);
      const RowsArgs some{x.data() + first * in_size, count, in_size};
      layer_ops_.linear(LinearArgs{some, {out_size, map.data(), nullptr}, Output::float32, alone.data()}, pool_);
      is_well &= std::equal(alone.begin(), alone.end(), among.begin() + first * out_size);
    }
    return is_well;
  }

  std::vector<Element> numbers(std::int64_t count) { return random_elements<Element>(count, source_); }

  std::vector<Element> packed(const std::vector<Element>& weight, std::int64_t in_size, std::int64_t out_size, bool is_gated) {
    return packed_weight(layer_ops_, pool_, weight, in_size, out_size, is_gated);
  }

  const LayerOps& layer_ops_;
  Pool& pool_;
  Sizes sizes_;
  std::mt19937& source_;
};

template <class Element>
double greatest_error(const LayerOps& layer_ops) {
  std::mt19937 source(1);
  Pool pool(3);
  double worst = 0.0;
  for (int trial = 0; trial < 60; ++trial) {
    const std::int64_t max_rows = trial % 3 ? 40 : 200;
    Sizes sizes{1 + random_below(max_rows, source), 1 + random_below(300, source), 1 + random_below(200, source)};
    if (trial % 20 == 19) sizes = {600, 1100, 600};  // several blocks of rows, of k and of panels
    worst = std::fmax(worst, Trial<Element>(layer_ops, pool, sizes, source).run());
  }
  return worst;
}

bool check(const Ops& ops) {
  const double of_bf16 = greatest_error<bf16>(ops.bfloat16), of_f16 = greatest_error<f16>(*ops.float16);
  const double of_floats = greatest_error<float>(*ops.float32);
  std::printf("%s: greatest error %.1e in bf16, %.1e in float16, %.1e in float32\n", ops.name, of_bf16, of_f16, of_floats);
  return std::fmax(std::fmax(of_bf16, of_f16), of_floats) < 1e-4;
}

}  // namespace

int main(int count, char** names) { return check_levels(count, names, check); }
