// Arguments of Mamba-2's state space and of the norm behind it: kernels/state_space.py defines both.
//
// Legend: T = tokens of the step, C = channels: values of all heads, then keys and queries of all groups, G = groups,
// H = heads, K = key size, V = value size, S = tokens that the state of the convolution holds, D = most drafts of a
// request, N = rows of requests, W = H * V.
#pragma once

#include <cstdint>

#include "state_step.h"

namespace octavo {

// One layer, in every step.
struct StateSpace {
  std::int64_t num_groups, num_heads, key_size, value_size, conv_size;  // conv_size: S + 1
  const float* conv;         // [S + 1, C], of the earliest token first
  const float* conv_bias;    // [C], or null
  const float* decay_rates;  // [H]
  const float* dt_bias;      // [H]
  const float* skip;         // [H]
  float least_dt, most_dt;
  float dt_scale, gate_scale;  // of what is projected
  bool applies_gates;

  std::int64_t shared() const { return num_heads / num_groups; }
  std::int64_t width() const { return num_heads * value_size; }
  std::int64_t num_channels() const { return width() + 2 * num_groups * key_size; }
  std::int64_t log_size() const { return num_channels() + num_heads; }
  std::int64_t row_size() const { return width() + log_size(); }
};

struct StateSpaceArgs : StateSpace, StateStep {
  const void* rows_in;      // [T, W + C + H]: gates of the result, channels, steps
  void* conv_states;        // [blocks, S, C]
  float* matrices;          // [blocks, H, K, V]
  void* log;                // [N, D, C + H], or null
  std::int64_t log_tokens;  // D
  void* out;                // [T, W]
  std::int64_t kv_group;
};

// The norm of groups of columns. Where ranks share a group, its sum of squares is added up between two ops.
struct GroupNormArgs {
  const void* x;              // [T, W]
  const void* gates;          // [T, gate_stride], of which W, or null
  std::int64_t gate_stride;
  float gate_scale;
  std::int64_t num_rows, width, group_size;
  std::int64_t first_column;  // of these W, in all ranks' columns
  std::int64_t num_groups;    // of all ranks
  const float* weight;        // [W]
  float eps;
  float* sums;                // [T, num_groups], or null: of these columns alone
  bool only_sums;             // write them, and nothing else
  void* out;                  // [T, W]
};

}  // namespace octavo
