// Arguments of linear attention by the gated delta rule: kernels/gated_delta.py defines it.
//
// Legend: T = tokens of the step, R = requests, C = channels: queries, keys and values, one head after the other,
// G = key heads, H = value heads, K = key size, V = value size, S = tokens that the state of the convolution holds,
// D = most drafts of a request, N = rows of requests.
#pragma once

#include <cstdint>

#include "state_step.h"

namespace octavo {

constexpr std::int64_t kMaxShared = 64;     // value heads of a key head

// One layer, in every step.
struct GatedDelta {
  std::int64_t num_key_heads, num_value_heads, key_size, value_size, conv_size;  // conv_size: S + 1
  const float* conv;         // [S + 1, C], of the earliest token first
  const float* decay_rates;  // [H]
  const float* dt_bias;      // [H]
  const float* norm;         // [V]
  float eps;

  std::int64_t shared() const { return num_value_heads / num_key_heads; }
  std::int64_t num_channels() const { return 2 * num_key_heads * key_size + num_value_heads * value_size; }
  std::int64_t row_size() const { return num_channels() + num_value_heads * value_size; }
};

struct GatedDeltaArgs : GatedDelta, StateStep {
  const void* rows_in;     // [T, C + H * V]: channels, then the gates of the result
  const void* gates;       // [T, 2 * H]
  void* conv_states;       // [blocks, S, C]
  float* matrices;         // [blocks, H, K, V]
  void* log;               // [N, D, C + 2 * H], or null
  std::int64_t log_tokens;  // D
  void* out;               // [T, H * V]
  std::int64_t kv_group;
};

// x times the sigmoid of logits, which are the ends of longer rows. Each is for `together` elements of x, one after the other.
struct GateArgs {
  const void* x;            // [T, D]
  const void* logits;       // [T, stride], of which D / together
  std::int64_t num_rows, size, stride, together;
  void* out;                // [T, D]
};

}  // namespace octavo
