// The ops, and the table of one ISA level's implementations.
//
// Legend: T = tokens (rows), K = input size, N = output size, D = hidden size.
#pragma once

#include <cstdint>

#include "attention.h"
#include "blocks.h"
#include "draw.h"
#include "gated_delta.h"
#include "short_conv.h"
#include "state_space.h"
#include "pool.h"

namespace octavo {

using bf16 = std::uint16_t;
struct f16 {  // IEEE 754 half precision
  std::uint16_t bits;

  friend bool operator==(f16, f16) = default;
};

enum class DType { bfloat16, float16, float32 };  // of activations and dense weights

constexpr std::int64_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

// A weight [N, K] in bf16 is packed for matrix tiles: panels of 32 outputs, each [ceil(K / 32)][2 tiles][16 pairs of
// k][16 outputs][2], padded with zeros. In float16 and float32 a panel is [ceil(K / 32)][32 k][32 outputs]. It is read
// once, sequentially.
//
// An activation is [T, K], row-major. Untyped pointers are of the dtype of the op: `LayerOps`.

// The activation between an MLP's two linears: `Activation` of kernels/types.py. The last two have no gate.
enum class ActivationKind { silu, gelu_tanh, clamped_swiglu, scaled_silu, relu2, plain_gelu };

struct Activation {
  ActivationKind kind = ActivationKind::silu;
  float limit = 0.0f, alpha = 0.0f;  // of clamped_swiglu

  bool is_gated() const { return kind != ActivationKind::relu2 && kind != ActivationKind::plain_gelu; }
};

// Prologue and epilogue of fused ops: `Fused` of kernels/types.py.
struct Fused {
  const void* residual = nullptr;     // [T, K] or null; added to the rows first
  const void* norm_weight = nullptr;  // [K]; null: no norm, and no residual
  float eps = 0.0f;
  float norm_offset = 0.0f;           // added to the norm's weight
  Activation activation = {};
  bool is_centered = false;           // a layer norm: the mean is subtracted first
  const void* norm_bias = nullptr;    // [K] or null; of a layer norm
};

// Rows of activations, the input of a linear.
struct RowsArgs {
  const void* x;          // [T, K]
  std::int64_t rows;      // T
  std::int64_t size;      // K
  Fused fused = {};
  void* total = nullptr;  // [T, K], receives x + residual; null without residual
};

// An integer weight of 8 or 4 bits: w = scale * q + offset, with a scale (and offset) per output and group of k. Panels
// of 32 outputs, each [ceil(K / 64)][2 tiles][16 quads of k][16 outputs][4]; with 4 bits, two quads share a line: q + 8
// in a nibble, the first quad in the low ones. q is -127 ... 127, or -8 ... 7.
//
// Two-level: 4 bits that expand to 8, with a multiplier per output and 32 of k: q = (q4 * m + 4) >> 3. See
// integer_two_level.inc.h.
struct Integers {
  int bits;                    // 8 or 4; 0: a dense weight
  bool is_two_level;              // 4 bits, and one scale per output
  std::int64_t group_size;     // 32, 64 or 128; 0: all of k
  const std::uint8_t* values;
  const float* scales;         // [panels][groups][32]
  const float* offsets;        // the same, or null: none
  bool is_rotated;             // activation rows are rotated too, in blocks of 64: integer_rotation.inc.h
  bool mixes_blocks;           // rotated blocks are mixed with each other
  Blocks blocks = {};          // in blocks of a GGUF file: bits is 8, group_size 32, and `values` are as blocks.h says
};

struct PackedWeight {
  std::int64_t out_size;  // N, or I if gated
  const void* weight;     // null if integers
  const float* bias;      // [panels * 32], in panel order, or null
  Integers integers = {};
};

// plain: in the dtype of the rows. gated: panels hold 16 gates and their 16 ups, which the activation combines.
// ungated: plain with an activation that has no gate. gates_and_ups: what `gated` would combine, [T, 2 * I], gates first.
enum class Output { plain, float32, gated, ungated, gates_and_ups };

inline Output activated_output(const Activation& activation) {
  return activation.is_gated() ? Output::gated : Output::ungated;
}

struct LinearArgs {
  RowsArgs rows;
  PackedWeight packed;
  Output output;
  void* out;  // [T, N]
};

// The largest result of a row, and the first output that has it; NaN if any result is.
struct Argmax {
  float value;
  std::int32_t output;
};

// A linear for each head, without bias: `Kernels.head_linears` of kernels/reference.py.
struct HeadLinearsArgs {
  RowsArgs rows;               // [T, H * (K + R)]
  const PackedWeight* heads;   // [H], dense, of one size N
  std::int64_t num_heads, in_size;  // H, K
  void* out;                   // [T, H * (N + R)]
};

// An activation by itself: [T, 2 * I] to [T, I], gates first, or [T, I] to [T, I]; `rows` names it.
struct ActivateArgs {
  RowsArgs rows;
  void* out;
};

// act(gates) * factors: of gates [T, I], the rows, and I columns of rows [T, stride]; `rows` names the activation.
struct GatedProductArgs {
  RowsArgs rows;
  const void* factors;  // the first of a row's columns
  std::int64_t stride;
  void* out;  // [T, I]
};

// (x + residual) * scale, rounded twice: `rows` has both; without a residual, x * scale.
struct ScaledSumArgs {
  RowsArgs rows;
  float scale;
  void* out;  // [T, K]
};

// Adapters (LoRA) of a merged linear [N, K], by slot: `LoraAdapters` of kernels/types.py.
struct LoraSlots {
  static constexpr std::size_t kMaxParts = 4;

  const void* down;           // [S, P * R, K]
  const void* up;             // [S, R, N]
  const std::int32_t* ranks;  // [S], at most R; 0: the linear is unchanged
  std::int64_t count, max_rank;        // S, R
  std::int64_t num_parts;              // P
  std::int64_t parts[kMaxParts];       // outputs of each

  std::int64_t num_outputs() const {
    std::int64_t sum = 0;
    for (std::int64_t part = 0; part < num_parts; ++part) sum += parts[part];
    return sum;
  }
};

// base += up(down(x)), for rows that have an adapter.
struct AddLoraArgs {
  RowsArgs rows;
  LoraSlots slots;
  const std::int64_t* adapter_ids;  // [T] slots; -1: none
  void* base;                       // [T, N]
};

struct ArgmaxArgs {
  RowsArgs rows;
  PackedWeight packed;  // not gated
  Argmax* out;         // [T]
};

struct MlpArgs {
  RowsArgs rows;
  PackedWeight up;  // gated if the activation is
  PackedWeight down;
  void* out;  // [T, N]
};

struct PackArgs {
  const void* weight;     // [N, K]; gated: [2 * N, K], gates first
  std::int64_t in_size;   // K
  std::int64_t out_size;  // N
  bool is_gated;
  void* packed;
};

// Quantizing computes `values` and `scales` from `weight`. Packing fills the panels, from those and `offsets`, or
// directly from `weight`, with the same result.
struct PackIntegersArgs {
  Integers form;           // bits, is_two_level and group_size only
  std::int64_t in_size;    // K
  std::int64_t out_size;   // N, or I if gated
  bool is_gated;
  const void* weight;      // [N, K]; gated: [2 * I, K], gates first; null if values are packed
  bool is_float16;         // the weight, else it is bf16
  std::int8_t* values;     // [N, K] or [2 * I, K]
  std::int8_t* multipliers;  // [N or 2 * I, ceil(K / 32)], two-level only
  float* scales;           // [N or 2 * I, groups]
  const float* offsets;    // the same, or null
  std::uint8_t* packed;
  float* packed_scales;    // [panels][groups][32]
  float* packed_offsets;   // the same, or null
  bool is_logits_head;     // error_feedback.cpp
};

// Rows of a GGUF file [N][bytes of a row].
struct BlockRows {
  const std::uint8_t* data;
  std::int64_t num_outputs;
};

// Repacks groups [first_group, first_group + K / 32) of the rows of some parts.
struct PackBlocksArgs {
  Blocks blocks;
  std::int64_t row_inputs, first_group;  // of the rows in the file
  std::int64_t in_size;                  // K
  std::int64_t out_size;                 // N, or I if gated
  BlockRows parts[Blocks::kMaxParts];
  std::uint8_t* packed;                  // zeros

  std::int64_t num_panels() const { return (out_size + (blocks.is_gated ? 15 : 31)) / (blocks.is_gated ? 16 : 32); }
};

// Reads rows back from a packed weight: the embedding of a tied logits head.
struct PackedRowsArgs {
  PackedWeight packed;      // dense, not gated
  std::int64_t size;        // K
  std::int64_t num_ids;
  const std::int64_t* ids;  // [T], below N
  void* out;                // [T, K]
};

struct NormArgs {
  RowsArgs rows;
  void* out;  // [T, K]
};

// RMS norms of parts of rows, one behind the other from the front, in two steps: sums of squares, which ranks may add
// up, then the norms, in place.
struct PartNormsArgs {
  static constexpr std::int64_t kMaxParts = 2;

  RowsArgs rows;                    // [T, N]; the second step writes them
  std::int64_t num_parts;           // P
  std::int64_t sizes[kMaxParts];    // elements of each part
  float* squares;                   // [T, P]
  const float* weights[kMaxParts];  // [sizes[p]]; null in the first step, with P = the parts that count: others are 0
  float totals[kMaxParts];          // of all ranks
  float eps;
};

// All-reduce: the ranks' parts added element by element, in the order of `parts`: in float32, rounded once.
struct SumArgs {
  const void* const* parts;  // [num_parts], each of `count` elements
  int num_parts;
  std::int64_t count;
  DType dtype;
  void* out;  // may alias a part
};

// The experts of a layer. All up weights have the same format, and so do all down weights.
struct Experts {
  std::int64_t count;              // X
  std::int64_t max_intermediate;  // the largest I
  const PackedWeight* up;          // [X], gated if the activation is
  const PackedWeight* down;        // [X]
};

// How a token chooses its C experts: top_k of X; and a shared expert, if any, as number X. Definition:
// kernels/routing.py.
struct Routing {
  static constexpr std::int64_t kMaxGroups = 64;

  std::int64_t num_experts, top_k;
  bool renormalizes;  // the weights of the chosen
  bool has_shared;
  bool chooses_by_logit = true;  // and weighs by softmax; what follows up to the correction is not used then
  bool is_softmax = true;        // scores of experts are shares of all, else sigmoids
  std::int64_t num_groups = 1, top_groups = 1, group_best = 1;
  const float* correction = nullptr;  // [X], added to scores for choosing only; or null
  float scale = 1.0f;                 // of weights
  float epsilon = 0.0f;               // added to the sum of weights
  bool gates_shared = true;           // its weight is the sigmoid of logit X; else 1

  std::int64_t num_choices() const { return top_k + has_shared; }
};

struct RouteArgs {
  RowsArgs rows;
  PackedWeight router;
  Routing routing;
  std::int64_t* expert_ids;  // [T, C]
  float* weights;            // [T, C]
};

struct ExpertRowsArgs {
  RowsArgs rows;
  Experts experts;
  std::int64_t num_pairs;         // R
  const std::int64_t* token_ids;  // [R]
  const std::int64_t* expert_ids;
  void* out;                      // [R, D]
};

struct CombineArgs {
  const void* answers;   // [T, C, D]
  const float* weights;  // [T, C]
  std::int64_t num_tokens, num_choices, size;
  void* out;             // [T, D]
};

// Route, compute, combine.
struct MoeArgs {
  RowsArgs rows;
  PackedWeight router;
  Routing routing;
  Experts experts;
  std::int64_t* load;  // [X], incremented by the tokens that chose each expert
  void* out;           // [T, D]
};

// Ops of one dtype of activations and dense weights.
struct LayerOps {
  void (*pack_linear)(const PackArgs&, Pool&);
  void (*linear)(const LinearArgs&, Pool&);
  void (*head_linears)(const HeadLinearsArgs&, Pool&);
  void (*argmax)(const ArgmaxArgs&, Pool&);
  void (*mlp)(const MlpArgs&, Pool&);
  void (*activate)(const ActivateArgs&, Pool&);
  void (*gated_product)(const GatedProductArgs&, Pool&);
  void (*scaled_sum)(const ScaledSumArgs&, Pool&);
  void (*add_lora)(const AddLoraArgs&, Pool&);
  void (*route)(const RouteArgs&, Pool&);
  void (*expert_rows)(const ExpertRowsArgs&, Pool&);
  void (*combine_experts)(const CombineArgs&, Pool&);
  void (*moe)(const MoeArgs&, Pool&);
  void (*rms_norm)(const NormArgs&, Pool&);
  void (*part_squares)(const PartNormsArgs&, Pool&);
  void (*scale_parts)(const PartNormsArgs&, Pool&);
  void (*attention)(const AttentionArgs&, Pool&);
  void (*gated_delta)(const GatedDeltaArgs&, Pool&);
  void (*short_conv)(const ShortConvArgs&, Pool&);
  void (*state_space)(const StateSpaceArgs&, Pool&);
  void (*norm_groups)(const GroupNormArgs&, Pool&);
  void (*gate)(const GateArgs&, Pool&);
};

// Ops whose weights are integers, or whose experts' are: activations of one dtype, bf16 or float16.
struct IntegerOps {
  void (*linear)(const LinearArgs&, Pool&);
  void (*argmax)(const ArgmaxArgs&, Pool&);
  void (*mlp)(const MlpArgs&, Pool&);
  void (*expert_rows)(const ExpertRowsArgs&, Pool&);
  void (*moe)(const MoeArgs&, Pool&);
};

struct Ops {
  const char* name;
  LayerOps bfloat16;
  const LayerOps *float16, *float32;
  IntegerOps integers_bfloat16, integers_float16;
  void (*quantize)(const PackIntegersArgs&, Pool&);
  void (*pack_integers)(const PackIntegersArgs&, Pool&);
  void (*sum)(const SumArgs&);
  const DrawOps* draw;
};

// The same at every level: it only copies. Throws std::out_of_range for an id out of range.
template <class Element>
void packed_rows(const PackedRowsArgs& args, Pool& pool);
extern template void packed_rows<bf16>(const PackedRowsArgs& args, Pool& pool);
extern template void packed_rows<f16>(const PackedRowsArgs& args, Pool& pool);
extern template void packed_rows<float>(const PackedRowsArgs& args, Pool& pool);

std::int64_t packed_size(std::int64_t in_size, std::int64_t out_size, bool is_gated);  // elements
std::int64_t packed_integers_size(const PackIntegersArgs& args);                       // bytes
std::int64_t packed_scales_size(const PackIntegersArgs& args);                         // floats; offsets take the same
std::int64_t packed_blocks_size(const PackBlocksArgs& args);                           // bytes

void pack_blocks(const PackBlocksArgs& args, Pool& pool);  // the same at every level: blocks.cpp

// How errors of rounding `weight` are fed back from input to input of a block of 64: [K / 64][64][64], in the pool's scratch
// memory. The same at every level.
const float* error_feedback(const PackIntegersArgs& args, Pool& pool);

extern const LayerOps float16_ops_portable, float32_ops_portable;
extern const Ops ops_portable;
#if defined(__x86_64__)
extern const LayerOps float16_ops_avx2, float16_ops_avx512, float32_ops_avx2, float32_ops_avx512;
extern const Ops ops_avx2, ops_avx2_vnni, ops_avx512_vnni, ops_avx512, ops_amx;
#endif

}  // namespace octavo
