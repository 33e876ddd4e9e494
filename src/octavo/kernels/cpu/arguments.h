// Op arguments as Python passes them: addresses are integers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops.h"

namespace octavo {

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline AttentionLayer make_layer(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                                 std::int64_t block_size, std::int64_t sliding_window, std::uintptr_t query_norm,
                                 std::uintptr_t key_norm, std::uintptr_t sinks, float norm_eps, float scale,
                                 float soft_cap, std::int64_t rotary, bool has_int8_kv, bool computes_kept_only,
                                 std::int64_t kv_group, bool normalizes_values, std::int64_t num_parts,
                                 std::int64_t gate_heads, std::int64_t latent_size, bool rotates_pairs, bool norms_behind,
                                 std::int64_t query_rotary, std::int64_t chunk_size) {
  if (head_dim > kMaxHeadDim) throw std::invalid_argument("head_dim is too large");
  if (latent_size < 0 || latent_size > head_dim) throw std::invalid_argument("a latent value is not a part of its key");
  if (latent_size && (num_kv_heads != 1 || num_parts != 1 || has_int8_kv || sinks || query_norm || rotary < 0 || !key_norm))
    throw std::invalid_argument("a latent layer has one vector, normalized and rotated, in the dtype of the op");
  return {num_heads, num_kv_heads, head_dim, block_size, sliding_window, at<const float>(query_norm),
          at<const float>(key_norm), at<const float>(sinks), norm_eps, scale, soft_cap, rotary, has_int8_kv,
          computes_kept_only, kv_group, normalizes_values, num_parts, gate_heads, latent_size, rotates_pairs, norms_behind,
          query_rotary, chunk_size};
}

inline RotaryTable make_rotary_table(std::uintptr_t cos, std::uintptr_t sin, std::int64_t num_pairs) {
  return {at<const float>(cos), at<const float>(sin), num_pairs};
}

inline RowBlocks make_row_blocks(std::int64_t count, std::uintptr_t of) { return {count, at<const std::int32_t>(of)}; }

inline AttentionStep make_step(std::int64_t num_tokens, std::int64_t num_kept, std::int64_t num_blocks_per_request,
                               const std::vector<RotaryTable>& rotary_tables, std::uintptr_t slots,
                               std::uintptr_t query_start_loc, std::uintptr_t seq_lens, std::uintptr_t block_table,
                               std::uintptr_t kept, std::uintptr_t visible_ends, const RowBlocks& all_blocks,
                               const RowBlocks& kept_blocks) {
  if (rotary_tables.size() > kMaxRotaryTables) throw std::invalid_argument("a step has too many rotary tables");
  AttentionStep step = {num_tokens, num_kept, num_blocks_per_request, {}, at<const std::int64_t>(slots),
                        at<const std::int32_t>(query_start_loc), at<const std::int32_t>(seq_lens),
                        at<const std::int32_t>(block_table), at<const std::int64_t>(kept),
                        at<const std::int32_t>(visible_ends), all_blocks, kept_blocks};
  std::copy(rotary_tables.begin(), rotary_tables.end(), step.rotary_tables);
  return step;
}

inline RotaryTable table_of(const AttentionStep& step, std::int64_t number, std::int64_t head_dim) {
  if (number < 0) return {};
  if (number >= kMaxRotaryTables) throw std::out_of_range("a layer names a rotary table that no step has");
  const RotaryTable& table = step.rotary_tables[number];
  if (!table.cos) throw std::out_of_range("a layer names a rotary table that the step lacks");
  if (table.num_pairs * 2 > head_dim) throw std::invalid_argument("a rotary table is wider than heads");
  return table;
}

// Gives attention its step. Throws where that lacks what the layer names.
inline void set_step(AttentionArgs& args, const AttentionStep& step) {
  static_cast<AttentionStep&>(args) = step;
  args.angles = table_of(step, args.rotary, args.head_dim);
  args.query_angles = table_of(step, args.query_rotary, args.head_dim);
  if (args.latent_size && args.angles.num_pairs * 2 != args.head_dim - args.latent_size)
    throw std::invalid_argument("a rotary table is as wide as what is behind a latent value");
}

inline GatedDelta make_gated_delta(std::int64_t num_key_heads, std::int64_t num_value_heads, std::int64_t key_size,
                                   std::int64_t value_size, std::int64_t conv_size, std::uintptr_t conv,
                                   std::uintptr_t decay_rates, std::uintptr_t dt_bias, std::uintptr_t norm, float eps) {
  if (num_key_heads < 1 || num_value_heads % num_key_heads) throw std::invalid_argument("value heads share key heads");
  if (num_value_heads / num_key_heads > kMaxShared) throw std::invalid_argument("too many value heads share a key head");
  if (conv_size < 1 || conv_size - 1 > kMaxConvTokens) throw std::invalid_argument("a convolution sees too many tokens");
  return {num_key_heads,         num_value_heads,         key_size,           value_size, conv_size,
          at<const float>(conv), at<const float>(decay_rates), at<const float>(dt_bias), at<const float>(norm), eps};
}

inline ShortConv make_short_conv(std::int64_t num_channels, std::int64_t conv_size, std::uintptr_t conv, std::uintptr_t bias) {
  if (conv_size < 1 || conv_size - 1 > kMaxConvTokens) throw std::invalid_argument("a convolution sees too many tokens");
  return {num_channels, conv_size, at<const float>(conv), at<const float>(bias)};
}

inline StateSpace make_state_space(std::int64_t num_groups, std::int64_t num_heads, std::int64_t key_size,
                                   std::int64_t value_size, std::int64_t conv_size, std::uintptr_t conv,
                                   std::uintptr_t conv_bias, std::uintptr_t decay_rates, std::uintptr_t dt_bias,
                                   std::uintptr_t skip, float least_dt, float most_dt, float dt_scale,
                                   float gate_scale, bool applies_gates) {
  if (num_groups < 1 || num_heads % num_groups) throw std::invalid_argument("heads are in groups of one size");
  if (conv_size < 1 || conv_size - 1 > kMaxConvTokens) throw std::invalid_argument("a convolution sees too many tokens");
  return {num_groups,
          num_heads,
          key_size,
          value_size,
          conv_size,
          at<const float>(conv),
          at<const float>(conv_bias),
          at<const float>(decay_rates),
          at<const float>(dt_bias),
          at<const float>(skip),
          least_dt,
          most_dt,
          dt_scale,
          gate_scale,
          applies_gates};
}

inline GroupNormArgs make_group_norm(std::uintptr_t x, std::uintptr_t gates, std::int64_t gate_stride, float gate_scale,
                                     std::int64_t num_rows, std::int64_t width, std::int64_t group_size, std::int64_t first_column,
                                     std::int64_t num_groups, std::uintptr_t weight, float eps, std::uintptr_t sums,
                                     bool only_sums, std::uintptr_t out) {
  if (group_size < 1 || first_column + width > num_groups * group_size)
    throw std::invalid_argument("columns are beyond the last group");
  if (only_sums && !sums) throw std::invalid_argument("there is no place for sums");
  return {at<void>(x), at<void>(gates), gate_stride, gate_scale, num_rows,  width,        group_size, first_column,
          num_groups, at<const float>(weight), eps, at<float>(sums), only_sums, at<void>(out)};
}

inline StateStep make_state_step(std::int64_t num_requests, std::uintptr_t query_start_loc, std::uintptr_t slots,
                                 std::uintptr_t begins, std::uintptr_t num_replayed, std::uintptr_t num_drafts,
                                 std::uintptr_t rows) {
  return {num_requests, at<const std::int32_t>(query_start_loc), at<const std::int64_t>(slots),
          at<const std::int64_t>(begins), at<const std::int32_t>(num_replayed), at<const std::int32_t>(num_drafts),
          at<const std::int64_t>(rows)};
}

inline Activation make_activation(const std::string& kind, float limit, float alpha) {
  constexpr std::pair<const char*, ActivationKind> kinds[] = {{"silu", ActivationKind::silu},
                                                              {"gelu_tanh", ActivationKind::gelu_tanh},
                                                              {"clamped_swiglu", ActivationKind::clamped_swiglu},
                                                              {"scaled_silu", ActivationKind::scaled_silu},
                                                              {"relu2", ActivationKind::relu2},
                                                              {"plain_gelu", ActivationKind::plain_gelu}};
  for (const auto& [name, known] : kinds)
    if (kind == name) return {known, limit, alpha};
  throw std::invalid_argument("unknown activation " + kind);
}

inline Fused make_fused(std::uintptr_t residual, std::uintptr_t norm_weight, float eps, float norm_offset,
                        const Activation& activation, bool is_centered, std::uintptr_t norm_bias) {
  return {at<void>(residual), at<void>(norm_weight), eps, norm_offset, activation, is_centered, at<void>(norm_bias)};
}

inline RowsArgs make_rows(std::uintptr_t x, std::int64_t rows, std::int64_t size) { return {at<void>(x), rows, size}; }

inline RowsArgs make_fused_rows(std::uintptr_t x, std::int64_t rows, std::int64_t size, const Fused& fused,
                                std::uintptr_t total) {
  return {at<void>(x), rows, size, fused, at<void>(total)};
}

inline PackIntegersArgs make_integers(int bits, std::int64_t group_size, bool is_two_level, bool is_rotated, bool mixes_blocks,
                                      std::int64_t in_size, std::int64_t out_size, bool is_gated, bool is_logits_head) {
  const bool is_known = (bits == 8 || bits == 4) && (group_size == 0 || group_size == 32 || group_size == 64 || group_size == 128);
  if (!is_known) throw std::invalid_argument("integers have 8 or 4 bits and groups of 32, 64, 128 or 0 (all of k)");
  if (is_two_level && (bits != 4 || group_size != 0)) throw std::invalid_argument("two-level integers have 4 bits and one scale");
  // Keeps sums of 8-bit products within 32 bits.
  if (in_size > std::int64_t{1} << 17) throw std::invalid_argument("an integer linear takes at most 131072 inputs");
  PackIntegersArgs args = {};
  args.form.bits = bits, args.form.group_size = group_size, args.form.is_two_level = is_two_level;
  args.form.is_rotated = is_rotated, args.form.mixes_blocks = mixes_blocks;
  args.in_size = in_size, args.out_size = out_size, args.is_gated = is_gated, args.is_logits_head = is_logits_head;
  return args;
}

inline PackedWeight make_packed_integers(const PackIntegersArgs& args, std::uintptr_t values, std::uintptr_t scales,
                                         std::uintptr_t offsets, std::uintptr_t bias) {
  return {args.out_size, nullptr, at<const float>(bias),
          {args.form.bits, args.form.is_two_level, args.form.group_size, at<const std::uint8_t>(values), at<const float>(scales),
           at<const float>(offsets), args.form.is_rotated, args.form.mixes_blocks}};
}

// Parts of a weight in blocks, by ggml's numbers of their types; span: groups of 32 inputs that share an outer scale.
inline PackBlocksArgs make_blocks(const std::vector<int>& types, const std::vector<std::int64_t>& sizes, bool is_gated,
                                  std::int64_t row_inputs, std::int64_t first_input, std::int64_t in_size, std::int64_t span) {
  if (types.empty() || types.size() > Blocks::kMaxParts || types.size() != sizes.size() || (is_gated && types.size() != 2))
    throw std::invalid_argument("a weight in blocks has one to four parts, and two if it is gated");
  if (in_size % kBlockGroup || first_input % kBlockGroup || row_inputs < first_input + in_size)
    throw std::invalid_argument("inputs of a weight in blocks are whole groups of 32");
  if (in_size > std::int64_t{1} << 17) throw std::invalid_argument("an integer linear takes at most 131072 inputs");
  PackBlocksArgs args = {};
  args.blocks.num_parts = static_cast<int>(types.size());
  args.blocks.is_gated = is_gated, args.blocks.span = span;
  args.row_inputs = row_inputs, args.first_group = first_input / kBlockGroup, args.in_size = in_size;
  for (std::size_t i = 0; i < types.size(); ++i) {
    const BlockType type = static_cast<BlockType>(types[i]);
    const BlockTraits traits = traits_of(type);
    if (traits.bits == 0) throw std::invalid_argument("unknown type of blocks");
    if (row_inputs % traits.block_inputs) throw std::invalid_argument("rows consist of whole blocks");
    if (!is_gated && i + 1 < types.size() && sizes[i] % kStripOutputs)
      throw std::invalid_argument("outputs of a part in blocks are a multiple of 16");
    args.blocks.types[i] = type;
    args.blocks.num_strips[i] = (sizes[i] + kStripOutputs - 1) / kStripOutputs;
    args.parts[i].num_outputs = sizes[i];
    args.out_size = is_gated ? sizes[0] : args.out_size + sizes[i];
  }
  return args;
}

inline PackedWeight make_packed_blocks(const PackBlocksArgs& args, std::uintptr_t values, std::uintptr_t bias) {
  Integers form = {};
  form.bits = 8, form.group_size = kBlockGroup, form.values = at<const std::uint8_t>(values), form.blocks = args.blocks;
  return {args.out_size, nullptr, at<const float>(bias), form};
}

inline PackedWeight make_packed(std::int64_t out_size, std::uintptr_t weight, std::uintptr_t bias) {
  return {out_size, at<void>(weight), at<const float>(bias), {}};
}

inline LoraSlots make_lora_slots(std::uintptr_t down, std::uintptr_t up, std::uintptr_t ranks, std::int64_t count,
                                 std::int64_t max_rank, const std::vector<std::int64_t>& parts) {
  if (parts.size() > LoraSlots::kMaxParts) throw std::invalid_argument("a linear with adapters has too many parts");
  LoraSlots slots = {at<const void>(down), at<const void>(up), at<const std::int32_t>(ranks), count, max_rank,
                     static_cast<std::int64_t>(parts.size()), {}};
  std::copy(parts.begin(), parts.end(), slots.parts);
  return slots;
}

// The weights of a layer's experts; must outlive the result of `experts()`.
class ExpertWeights {
 public:
  ExpertWeights(std::vector<PackedWeight> up, std::vector<PackedWeight> down)
      : up_(std::move(up)), down_(std::move(down)) {
    if (up_.size() != down_.size()) throw std::invalid_argument("an expert needs an up and a down linear");
    if (!have_one_form(up_) || !have_one_form(down_)) throw std::invalid_argument("experts have weights of one form");
  }

  bool are_integers() const { return !up_.empty() && up_[0].integers.bits; }

  Experts experts() const {
    std::int64_t most = 0;
    for (const PackedWeight& weight : up_) most = std::max(most, weight.out_size);
    return {static_cast<std::int64_t>(up_.size()), most, up_.data(), down_.data()};
  }

 private:
  static bool have_one_form(const std::vector<PackedWeight>& weights) {
    return std::all_of(weights.begin(), weights.end(), [&](const PackedWeight& weight) {
      const Integers &form = weight.integers, &first = weights[0].integers;
      return form.bits == first.bits && form.group_size == first.group_size &&
             form.is_two_level == first.is_two_level && form.is_rotated == first.is_rotated &&
             form.mixes_blocks == first.mixes_blocks && (form.blocks.num_parts == 0) == (first.blocks.num_parts == 0);
    });
  }

  std::vector<PackedWeight> up_, down_;
};

// The weights of a layer's heads, dense; must outlive all calls.
class HeadWeights {
 public:
  HeadWeights(std::vector<PackedWeight> linears, std::int64_t in_size) : linears_(std::move(linears)), in_size_(in_size) {
    if (linears_.empty()) throw std::invalid_argument("there is no head");
    for (const PackedWeight& weight : linears_)
      if (weight.integers.bits || weight.bias || weight.out_size != linears_[0].out_size)
        throw std::invalid_argument("heads have dense weights of one size, without bias");
  }

  const PackedWeight* data() const { return linears_.data(); }
  std::int64_t count() const { return static_cast<std::int64_t>(linears_.size()); }
  std::int64_t in_size() const { return in_size_; }

 private:
  std::vector<PackedWeight> linears_;
  std::int64_t in_size_;
};

inline Routing make_routing(std::int64_t num_experts, std::int64_t top_k, bool renormalizes, bool has_shared,
                            bool chooses_by_logit, bool is_softmax, std::int64_t num_groups, std::int64_t top_groups,
                            std::int64_t group_best, std::uintptr_t correction, float scale, float epsilon,
                            bool gates_shared) {
  if (num_groups < 1 || num_groups > Routing::kMaxGroups || num_experts % num_groups)
    throw std::invalid_argument("the number of groups of experts is not between 1 and 64, or divides them unevenly");
  const std::int64_t size = num_experts / num_groups;
  if (top_groups < 1 || top_groups > num_groups) throw std::invalid_argument("top_groups is not between 1 and their number");
  if (group_best < 1 || group_best > 2 || group_best > size) throw std::invalid_argument("group_best is 1 or 2 experts");
  if (top_k < 1 || top_k > top_groups * size) throw std::invalid_argument("top_k is not between 1 and the number of experts");
  return {num_experts, top_k, renormalizes, has_shared, chooses_by_logit, is_softmax, num_groups, top_groups, group_best,
          at<const float>(correction), scale, epsilon, gates_shared};
}

}  // namespace octavo
