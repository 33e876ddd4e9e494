// Mixtures of experts, in every dtype and integers, under address and undefined-behavior sanitizers, at every level that
// this machine has, in odd sizes and buffers of exactly the size that they need; and the whole beside its parts. `make
// sanitize` runs it.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <random>
#include <vector>

#include "integer_weight.h"
#include "levels.h"
#include "numbers.h"
#include "ops.h"
#include "packed.h"

using namespace octavo;

namespace {

struct Sizes {
  std::int64_t rows, size, intermediate;
  Routing routing;

  std::int64_t num_experts() const { return routing.num_experts + routing.has_shared; }
  std::int64_t num_pairs() const { return rows * routing.num_choices(); }
};

template <class Element>
class Trial {
 public:
  // `form`: of the weights, which are no integers where it has no bits.
  Trial(const Ops& ops, const LayerOps& layer_ops, const IntegerOps& integer_ops, Pool& pool, const Sizes& sizes,
        const Integers& form, std::mt19937& source)
      : ops_(ops), layer_ops_(layer_ops), integer_ops_(integer_ops), pool_(pool), sizes_(sizes), form_(form), source_(source) {}

  // Says whether the whole has the bits of its parts, and an expert's rows those of its linears, and every token was counted.
  bool run() {
    const auto [rows, size, intermediate, routing] = sizes_;
    make_experts();
    const auto router = packed(sizes_.num_experts(), size, false);
    const PackedWeight router_map{sizes_.num_experts(), router.data(), nullptr};
    const auto x = numbers(rows * size), residual = numbers(rows * size), norm = numbers(size);
    std::vector<Element> total(rows * size), normed(rows * size), whole(rows * size), combined(rows * size);
    const RowsArgs from{x.data(), rows, size, {residual.data(), norm.data(), 1e-5f}, total.data()};
    std::vector<std::int64_t> load(routing.num_experts);
    (form_.bits ? integer_ops_.moe : layer_ops_.moe)(
        MoeArgs{from, router_map, routing, experts(), load.data(), whole.data()}, pool_);

    layer_ops_.rms_norm(NormArgs{from, normed.data()}, pool_);
    const RowsArgs plain{normed.data(), rows, size};
    std::vector<std::int64_t> token_ids(sizes_.num_pairs()), expert_ids(sizes_.num_pairs());
    std::vector<float> weights(sizes_.num_pairs());
    std::vector<Element> answers(sizes_.num_pairs() * size);
    layer_ops_.route(RouteArgs{plain, router_map, routing, expert_ids.data(), weights.data()}, pool_);
    for (std::int64_t pair = 0; pair < sizes_.num_pairs(); ++pair) token_ids[pair] = pair / routing.num_choices();
    (form_.bits ? integer_ops_.expert_rows : layer_ops_.expert_rows)(
        ExpertRowsArgs{plain, experts(), sizes_.num_pairs(), token_ids.data(), expert_ids.data(), answers.data()}, pool_);
    layer_ops_.combine_experts(
        CombineArgs{answers.data(), weights.data(), rows, routing.num_choices(), size, combined.data()}, pool_);

    std::int64_t num_counted = 0;
    for (const std::int64_t count : load) num_counted += count;
    return combined == whole && num_counted == rows * routing.top_k &&
           answers == by_linears(normed, token_ids, expert_ids);
  }

 private:
  // What each pair's expert makes of its token, a row and a map at a time.
  std::vector<Element> by_linears(const std::vector<Element>& tokens, const std::vector<std::int64_t>& token_ids,
                               const std::vector<std::int64_t>& expert_ids) {
    std::vector<Element> answers(token_ids.size() * sizes_.size);
    for (std::size_t pair = 0; pair < token_ids.size(); ++pair) {
      const PackedWeight& gate_up = gate_up_[expert_ids[pair]];
      std::vector<Element> middle(gate_up.out_size);
      const Element* token = tokens.data() + token_ids[pair] * sizes_.size;
      const RowsArgs row{token, 1, sizes_.size};
      linear(LinearArgs{row, gate_up, Output::gated, middle.data()});
      const RowsArgs next{middle.data(), 1, gate_up.out_size};
      Element* answer = answers.data() + static_cast<std::int64_t>(pair) * sizes_.size;
      linear(LinearArgs{next, down_[expert_ids[pair]], Output::plain, answer});
    }
    return answers;
  }

  void linear(const LinearArgs& args) { (form_.bits ? integer_ops_.linear : layer_ops_.linear)(args, pool_); }

  void make_experts() {
    for (std::int64_t expert = 0; expert < sizes_.num_experts(); ++expert) {
      const std::int64_t intermediate = sizes_.intermediate + expert % 3 * 20;
      gate_up_.push_back(map_of(intermediate, sizes_.size, true));
      down_.push_back(map_of(sizes_.size, intermediate, false));
    }
  }

  PackedWeight map_of(std::int64_t out_size, std::int64_t in_size, bool is_gated) {
    if (form_.bits) {
      integers_.push_back(IntegerWeight::random(form_, false, in_size, out_size, is_gated, source_).packed(ops_, pool_));
      return integers_.back().weight();
    }
    weights_.push_back(packed(out_size, in_size, is_gated));
    return {out_size, weights_.back().data(), nullptr};
  }

  Experts experts() const {
    std::int64_t most = 0;
    for (const PackedWeight& weight : gate_up_) most = std::max(most, weight.out_size);
    return {sizes_.num_experts(), most, gate_up_.data(), down_.data()};
  }

  std::vector<Element> numbers(std::int64_t count) { return random_elements<Element>(count, source_); }

  std::vector<Element> packed(std::int64_t out_size, std::int64_t in_size, bool is_gated) {
    const auto weight = numbers((is_gated ? 2 : 1) * out_size * in_size);
    return packed_weight(layer_ops_, pool_, weight, in_size, out_size, is_gated);
  }

  const Ops& ops_;
  const LayerOps& layer_ops_;
  const IntegerOps& integer_ops_;
  Pool& pool_;
  Sizes sizes_;
  Integers form_;
  std::mt19937& source_;
  std::vector<std::vector<Element>> weights_;
  std::deque<PackedIntegers> integers_;
  std::vector<PackedWeight> gate_up_, down_;
};

template <class Element>
int count_wrong(const Ops& ops, const LayerOps& layer_ops, const IntegerOps& integer_ops, const Integers& form, int num_trials) {
  std::mt19937 source(1);
  Pool pool(3);
  int num_wrong = 0;
  for (int trial = 0; trial < num_trials; ++trial) {
    const std::int64_t num_experts = 1 + source() % 20, top_k = 1 + source() % num_experts;
    const Routing routing{num_experts, top_k, trial % 2 == 0, trial % 3 == 0};
    const std::int64_t max_rows = trial % 4 ? 20 : 150;
    const Sizes sizes{1 + random_below(max_rows, source), 1 + random_below(200, source), 1 + random_below(90, source), routing};
    num_wrong += !Trial<Element>(ops, layer_ops, integer_ops, pool, sizes, form, source).run();
  }
  return num_wrong;
}

bool check(const Ops& ops) {
  const Integers none = make_form(0, 0, false);
  const IntegerOps &of_bf16 = ops.integers_bfloat16, &of_f16 = ops.integers_float16;
  int num_wrong = count_wrong<float>(ops, *ops.float32, {}, none, 40);
  for (const Integers& form : {none, make_form(8, 0, false), make_form(4, 32, false), make_form(4, 0, true, true)}) {
    num_wrong += count_wrong<bf16>(ops, ops.bfloat16, of_bf16, form, 20);
    num_wrong += count_wrong<f16>(ops, *ops.float16, of_f16, form, 20);
  }
  std::printf("%s: experts, %d trials went wrong\n", ops.name, num_wrong);
  return num_wrong == 0;
}

}  // namespace

int main(int count, char** names) { return check_levels(count, names, check); }
