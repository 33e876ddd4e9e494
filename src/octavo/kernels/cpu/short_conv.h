// Arguments of a short convolution between two gates: kernels/short_conv.py defines it.
//
// Legend: T = tokens of the step, C = channels, S = tokens that the state holds, D = most drafts of a request, N = rows of
// requests.
#pragma once

#include <cstdint>

#include "state_step.h"

namespace octavo {

// One layer, in every step.
struct ShortConv {
  std::int64_t num_channels, conv_size;  // C, S + 1
  const float* conv;                     // [S + 1, C], of the earliest token first
  const float* bias;                     // [C], or null
};

struct ShortConvArgs : ShortConv, StateStep {
  const void* rows_in;      // [T, 3 * C]: gates before the convolution, gates behind it, values
  void* conv_states;        // [blocks, S, C]
  void* log;                // [N, D, C], or null
  std::int64_t log_tokens;  // D
  void* out;                // [T, C]
  std::int64_t kv_group;
};

}  // namespace octavo
