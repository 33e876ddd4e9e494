// What layers that keep a state are told of a step: kernels/states.py defines it.
//
// Legend: T = tokens of the step, R = requests, N = rows of requests, S = tokens that the state of a convolution holds.
#pragma once

#include <cstdint>

namespace octavo {

constexpr std::int64_t kMaxConvTokens = 8;  // S, at most

// One step, in every layer of a recurrent KV group: `StateStep` of kernels/states.py.
struct StateStep {
  std::int64_t num_requests;            // R
  const std::int32_t* query_start_loc;  // [R + 1], a request's tokens in T
  const std::int64_t* slots;            // [T], where the state after each token is kept; -1: nowhere
  const std::int64_t* begins;           // [R], where the state is that requests begin with; -1: zeros
  const std::int32_t* num_replayed;     // [R], or null: tokens that are computed again, from the log
  const std::int32_t* num_drafts;       // [R], or null: of the last tokens, whose inputs are logged
  const std::int64_t* rows;             // [R], below N, or null
};

}  // namespace octavo
