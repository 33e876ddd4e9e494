// One level's ops for Python, with their own thread pool.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "available_ops.h"
#include "ops.h"
#include "select_columns.h"
#include "tape.h"

namespace octavo {

namespace nb = nanobind;

// One level's ops, with linears in one dtype, and the threads that run them.
class Kernels {
 public:
  Kernels(const std::string& level, int num_threads, DType dtype)
      : ops_(find_ops(level)),
        layer_ops_(dtype == DType::float32 ? *ops_.float32 : dtype == DType::float16 ? *ops_.float16 : ops_.bfloat16),
        integer_ops_(dtype == DType::float16 ? ops_.integers_float16 : ops_.integers_bfloat16),
        dtype_(dtype),
        packed_rows_(dtype == DType::float32   ? octavo::packed_rows<float>
                     : dtype == DType::float16 ? octavo::packed_rows<f16>
                                               : octavo::packed_rows<bf16>),
        select_columns_(size_of(dtype) == 4 ? octavo::select_columns<float> : octavo::select_columns<bf16>),
        pool_(num_threads) {}

  std::string level() const { return ops_.name; }
  int num_threads() const { return pool_.num_threads(); }

  void pack_linear(std::uintptr_t weight, std::int64_t in_size, std::int64_t out_size, bool is_gated,
                   std::uintptr_t packed) {
    run_now(layer_ops_.pack_linear, PackArgs{at<void>(weight), in_size, out_size, is_gated, at<void>(packed)});
  }

  void quantize(PackIntegersArgs args, std::uintptr_t weight, std::uintptr_t values, std::uintptr_t scales,
                std::uintptr_t multipliers) {
    args.multipliers = at<std::int8_t>(multipliers);
    set_weight(args, weight), args.values = at<std::int8_t>(values), args.scales = at<float>(scales);
    run_now(ops_.quantize, args);
  }

  void pack_weight(PackIntegersArgs args, std::uintptr_t weight, std::uintptr_t packed, std::uintptr_t packed_scales) {
    set_weight(args, weight);
    args.packed = at<std::uint8_t>(packed), args.packed_scales = at<float>(packed_scales);
    run_now(ops_.pack_integers, args);
  }

  void pack_integers(PackIntegersArgs args, std::uintptr_t values, std::uintptr_t scales, std::uintptr_t offsets,
                     std::uintptr_t multipliers, std::uintptr_t packed, std::uintptr_t packed_scales,
                     std::uintptr_t packed_offsets) {
    args.multipliers = at<std::int8_t>(multipliers);
    args.values = at<std::int8_t>(values), args.scales = at<float>(scales), args.offsets = at<const float>(offsets);
    args.packed = at<std::uint8_t>(packed), args.packed_scales = at<float>(packed_scales);
    args.packed_offsets = at<float>(packed_offsets);
    run_now(ops_.pack_integers, args);
  }

  void pack_blocks(PackBlocksArgs args, const std::vector<std::uintptr_t>& parts, std::uintptr_t packed) {
    for (std::size_t i = 0; i < parts.size() && i < Blocks::kMaxParts; ++i) args.parts[i].data = at<const std::uint8_t>(parts[i]);
    args.packed = at<std::uint8_t>(packed);
    run_now(octavo::pack_blocks, args);
  }

  void linear(const RowsArgs& rows, const PackedWeight& packed, Output output, std::uintptr_t out) {
    run(packed.integers.bits ? integers().linear : layer_ops_.linear, LinearArgs{rows, packed, output, at<void>(out)});
  }

  void head_linears(const RowsArgs& rows, const HeadWeights& heads, std::uintptr_t out) {
    run(layer_ops_.head_linears, HeadLinearsArgs{rows, heads.data(), heads.count(), heads.in_size(), at<void>(out)});
  }

  void argmax(const RowsArgs& rows, const PackedWeight& packed, std::uintptr_t out) {
    run_now(packed.integers.bits ? integers().argmax : layer_ops_.argmax, ArgmaxArgs{rows, packed, at<Argmax>(out)});
  }

  void mlp(const RowsArgs& rows, const PackedWeight& up, const PackedWeight& down, std::uintptr_t out) {
    run(up.integers.bits ? integers().mlp : layer_ops_.mlp, MlpArgs{rows, up, down, at<void>(out)});
  }

  void activate(const RowsArgs& rows, std::uintptr_t out) {
    run(layer_ops_.activate, ActivateArgs{rows, at<void>(out)});
  }

  void gated_product(const RowsArgs& rows, std::uintptr_t factors, std::int64_t stride, std::uintptr_t out) {
    run(layer_ops_.gated_product, GatedProductArgs{rows, at<const void>(factors), stride, at<void>(out)});
  }

  void scaled_sum(const RowsArgs& rows, float scale, std::uintptr_t out) {
    run(layer_ops_.scaled_sum, ScaledSumArgs{rows, scale, at<void>(out)});
  }

  void add_lora(const RowsArgs& rows, const LoraSlots& slots, std::uintptr_t adapter_ids, std::uintptr_t base) {
    run(layer_ops_.add_lora, AddLoraArgs{rows, slots, at<const std::int64_t>(adapter_ids), at<void>(base)});
  }

  void route(const RowsArgs& rows, const PackedWeight& router, const Routing& routing, std::uintptr_t expert_ids,
             std::uintptr_t weights) {
    run_now(layer_ops_.route, RouteArgs{rows, router, routing, at<std::int64_t>(expert_ids), at<float>(weights)});
  }

  void expert_rows(const RowsArgs& rows, const ExpertWeights& experts, std::int64_t num_pairs, std::uintptr_t token_ids,
                   std::uintptr_t expert_ids, std::uintptr_t out) {
    run_now(experts.are_integers() ? integers().expert_rows : layer_ops_.expert_rows,
            ExpertRowsArgs{rows, experts.experts(), num_pairs, at<const std::int64_t>(token_ids),
                           at<const std::int64_t>(expert_ids), at<void>(out)});
  }

  void combine_experts(std::uintptr_t answers, std::uintptr_t weights, std::int64_t num_tokens, std::int64_t num_choices,
                       std::int64_t size, std::uintptr_t out) {
    run_now(layer_ops_.combine_experts,
            CombineArgs{at<void>(answers), at<const float>(weights), num_tokens, num_choices, size, at<void>(out)});
  }

  void moe(const RowsArgs& rows, const PackedWeight& router, const Routing& routing, const ExpertWeights& experts,
           std::uintptr_t load, std::uintptr_t out) {
    run(experts.are_integers() ? integers().moe : layer_ops_.moe,
        MoeArgs{rows, router, routing, experts.experts(), at<std::int64_t>(load), at<void>(out)});
  }

  void rms_norm(const RowsArgs& rows, std::uintptr_t out) { run(layer_ops_.rms_norm, NormArgs{rows, at<void>(out)}); }

  void part_squares(const RowsArgs& rows, const std::vector<std::int64_t>& sizes, std::int64_t num_counted,
                    std::uintptr_t squares) {
    PartNormsArgs args = {rows, num_counted, {}, at<float>(squares), {}, {}, 0.0f};
    set_sizes(args, sizes);
    run(layer_ops_.part_squares, args);
  }

  void scale_parts(const RowsArgs& rows, const std::vector<std::int64_t>& sizes, std::uintptr_t squares,
                   const std::vector<std::uintptr_t>& weights, const std::vector<float>& totals, float eps) {
    PartNormsArgs args = {rows, PartNormsArgs::kMaxParts, {}, at<float>(squares), {}, {}, eps};
    set_sizes(args, sizes);
    for (std::size_t i = 0; i < sizes.size(); ++i) args.weights[i] = at<const float>(weights.at(i)), args.totals[i] = totals.at(i);
    run(layer_ops_.scale_parts, args);
  }

  void attention(const AttentionStep& step, const AttentionLayer& layer, std::uintptr_t qkv, std::uintptr_t keys,
                 std::uintptr_t values, std::uintptr_t out) {
    AttentionArgs args = {layer, {}, at<void>(qkv), at<void>(out), at<void>(keys), at<void>(values)};
    if (!recorded_tape()) set_step(args, step);  // a tape's replays bring theirs
    run(layer_ops_.attention, args);
  }

  void gated_delta(const StateStep& step, const GatedDelta& layer, std::int64_t kv_group, std::uintptr_t rows,
                   std::uintptr_t gates, std::uintptr_t conv_states, std::uintptr_t matrices, std::uintptr_t log,
                   std::int64_t log_tokens, std::uintptr_t out) {
    run(layer_ops_.gated_delta,
        GatedDeltaArgs{layer, step, at<void>(rows), at<void>(gates), at<void>(conv_states), at<float>(matrices),
                       at<void>(log), log_tokens, at<void>(out), kv_group});
  }

  void short_conv(const StateStep& step, const ShortConv& layer, std::int64_t kv_group, std::uintptr_t rows,
                  std::uintptr_t conv_states, std::uintptr_t log, std::int64_t log_tokens, std::uintptr_t out) {
    run(layer_ops_.short_conv, ShortConvArgs{layer, step, at<void>(rows), at<void>(conv_states), at<void>(log), log_tokens,
                                             at<void>(out), kv_group});
  }

  void state_space(const StateStep& step, const StateSpace& layer, std::int64_t kv_group, std::uintptr_t rows,
                   std::uintptr_t conv_states, std::uintptr_t matrices, std::uintptr_t log, std::int64_t log_tokens,
                   std::uintptr_t out) {
    run(layer_ops_.state_space, StateSpaceArgs{layer, step, at<void>(rows), at<void>(conv_states), at<float>(matrices),
                                               at<void>(log), log_tokens, at<void>(out), kv_group});
  }

  void norm_groups(const GroupNormArgs& args) { run(layer_ops_.norm_groups, args); }

  void gate(std::uintptr_t x, std::uintptr_t logits, std::int64_t num_rows, std::int64_t size, std::int64_t stride,
            std::int64_t together, std::uintptr_t out) {
    if (together < 1 || size % together) throw std::invalid_argument("a logit is for as many elements as any other");
    run(layer_ops_.gate, GateArgs{at<void>(x), at<void>(logits), num_rows, size, stride, together, at<void>(out)});
  }

  void latent_attention(const AttentionStep& step, const AttentionLayer& layer, std::uintptr_t queries,
                        std::uintptr_t vectors, std::uintptr_t pool, std::uintptr_t out) {
    if (!layer.latent_size) throw std::invalid_argument("this layer has keys and values apart");
    AttentionArgs args = {layer, {}, at<void>(queries), at<void>(out), at<void>(pool), at<void>(pool), at<void>(vectors)};
    if (!recorded_tape()) set_step(args, step);
    run(layer_ops_.attention, args);
  }

  void keep_rows(std::uintptr_t x, std::int64_t row_bytes, std::uintptr_t out) {
    if (!recorded_tape()) throw std::logic_error("keep_rows works only while a tape is recorded");
    recorded_tape()->add(KeepRowsArgs{at<const char>(x), row_bytes, at<char>(out)});
  }

  void select_columns(const RowsArgs& rows, std::uintptr_t order, std::int64_t num_columns, std::uintptr_t out) {
    run(select_columns_, SelectColumnsArgs{rows, at<const std::int32_t>(order), num_columns, at<void>(out)});
  }

  void packed_rows(const PackedWeight& packed, std::int64_t size, std::int64_t num_ids, std::uintptr_t ids,
                   std::uintptr_t out) {
    run_now(packed_rows_, PackedRowsArgs{packed, size, num_ids, at<const std::int64_t>(ids), at<void>(out)});
  }

  void draw(std::uintptr_t logits, std::int64_t num_rows, std::int64_t vocab_size, std::uintptr_t rows,
            std::uintptr_t token_ids, std::uintptr_t largest) {
    const DrawArgs args = {at<const float>(logits), num_rows,   vocab_size, at<const DrawRow>(rows),
                           at<std::int64_t>(token_ids), at<float>(largest)};
    nb::gil_scoped_release released;
    const std::lock_guard<std::mutex> lock(pool_.mutex());
    const InPhase phase(pool_.phases(), Phase::other);
    octavo::draw(*ops_.draw, args, pool_);
  }

  // Seconds of calls by phase, from `start_phases` on.
  void start_phases() { pool_.phases().start(); }
  std::map<std::string, double> phase_seconds() {
    const PhaseTimes::Seconds seconds = pool_.phases().seconds();
    std::map<std::string, double> result;
    for (std::size_t i = 0; i < seconds.size(); ++i) result[kPhaseNames[i]] = seconds[i];
    return result;
  }

  void begin_recording(Tape& tape) { recorded_tape() = &tape; }
  void end_recording() { recorded_tape() = nullptr; }

  void replay(const Tape& tape, std::int64_t num_rows, std::int64_t num_kept, std::uintptr_t kept, const Tape::Steps& steps,
              const Tape::StateSteps& state_steps) {
    nb::gil_scoped_release released;
    tape.replay(pool_, num_rows, {num_kept, at<const std::int64_t>(kept)}, steps, state_steps);
  }

 private:
  const IntegerOps& integers() const {
    if (dtype_ == DType::float32) throw std::invalid_argument("weights of integers take bfloat16 or float16 rows");
    return integer_ops_;
  }

  static void set_sizes(PartNormsArgs& args, const std::vector<std::int64_t>& sizes) {
    std::int64_t total = 0;
    for (const std::int64_t size : sizes) total += size;
    if (sizes.size() != PartNormsArgs::kMaxParts || total > args.rows.size)
      throw std::invalid_argument("two parts of a row are normalized");
    std::copy(sizes.begin(), sizes.end(), args.sizes);
  }

  void set_weight(PackIntegersArgs& args, std::uintptr_t weight) const {
    args.weight = at<void>(weight), args.is_float16 = dtype_ == DType::float16;
  }

  // An op of a step's layers, which a tape takes.
  template <class Args>
  void run(void (*op)(const Args&, Pool&), const Args& args) {
    recorded_tape() ? recorded_tape()->add(op, args) : run_now(op, args);
  }

  template <class Args>
  void run_now(void (*op)(const Args&, Pool&), const Args& args) {
    if (recorded_tape()) throw std::logic_error("this op cannot be recorded");
    nb::gil_scoped_release released;
    const std::lock_guard<std::mutex> lock(pool_.mutex());
    const InPhase phase(pool_.phases(), Phase::other);
    op(args, pool_);
  }

  const Ops& ops_;
  const LayerOps& layer_ops_;
  const IntegerOps& integer_ops_;
  DType dtype_;
  void (*packed_rows_)(const PackedRowsArgs&, Pool&);
  void (*select_columns_)(const SelectColumnsArgs&, Pool&);
  Pool pool_;
};

}  // namespace octavo
