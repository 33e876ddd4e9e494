// The tape: a step's calls, recorded once and replayed in one call.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "arguments.h"
#include "collective.h"
#include "ops.h"

namespace octavo {

// Rows [T, size] to all-reduce in place.
struct AllReduceArgs {
  Collective& collective;
  void* x;
  std::int64_t rows;
  std::int64_t size;
  DType dtype;
};

// Gathers the kept rows of a step: x [T] -> out [W].
struct KeepRowsArgs {
  const char* x;
  std::int64_t row_bytes;
  char* out;
};

// The rows of a step that are kept behind the last layer that mixes tokens: W.
struct KeptRows {
  std::int64_t count;
  const std::int64_t* rows;  // [W], in T; null: the first ones
};

// Calls recorded instead of made. `replay` makes them with another step and number of rows: T, and W from the first
// KeepRows on. There is one step per KV group, those of recurrent groups are the last.
class Tape {
 public:
  using Steps = std::vector<AttentionStep>;
  using StateSteps = std::vector<StateStep>;

  // Any op: `set` replaces the arguments that differ in a replay.
  template <class Args>
  void add(void (*op)(const Args&, Pool&), const Args& args) {
    calls_.push_back([op, args](Replay& replay) {
      Args now = args;
      set(now, replay);
      const std::lock_guard<std::mutex> lock(replay.pool.mutex());
      op(now, replay.pool);
    });
  }

  // Without the pool's lock: other ranks may be threads of this process, and need the pool to get here.
  void add(const AllReduceArgs& args) {
    calls_.push_back([args](Replay& replay) {
      args.collective.all_reduce(args.x, replay.num_rows * args.size, args.dtype);
    });
  }

  void add(const KeepRowsArgs& args) {
    calls_.push_back([args](Replay& replay) {
      const auto [count, rows] = replay.kept;
      const auto size = static_cast<std::size_t>(args.row_bytes);
      if (!rows) std::memcpy(args.out, args.x, size * static_cast<std::size_t>(count));
      for (std::int64_t i = 0; rows && i < count; ++i)
        std::memcpy(args.out + i * args.row_bytes, args.x + rows[i] * args.row_bytes, size);
      replay.num_rows = count;
    });
  }

  std::size_t size() const { return calls_.size(); }

  void replay(Pool& pool, std::int64_t num_rows, const KeptRows& kept, const Steps& steps,
              const StateSteps& state_steps) const {
    const InPhase phase(pool.phases(), Phase::other);
    Replay replay = {pool, num_rows, kept, steps, state_steps};
    for (const Call& call : calls_) call(replay);
  }

 private:
  struct Replay {
    Pool& pool;
    std::int64_t num_rows;  // T, then W
    const KeptRows& kept;
    const Steps& steps;
    const StateSteps& state_steps;
  };
  using Call = std::function<void(Replay&)>;

  template <class Args>
  static void set(Args& args, const Replay& replay) {
    args.rows.rows = replay.num_rows;
  }
  static void set(AttentionArgs& args, const Replay& replay) {
    set_step(args, replay.steps.at(static_cast<std::size_t>(args.kv_group)));
  }

  static void set(GatedDeltaArgs& args, const Replay& replay) { set_state_step(args, replay); }
  static void set(ShortConvArgs& args, const Replay& replay) { set_state_step(args, replay); }
  static void set(StateSpaceArgs& args, const Replay& replay) { set_state_step(args, replay); }
  template <class Args>
  static void set_state_step(Args& args, const Replay& replay) {
    static_cast<StateStep&>(args) = replay.state_steps.at(static_cast<std::size_t>(args.kv_group) - replay.steps.size());
  }
  static void set(GateArgs& args, const Replay& replay) { args.num_rows = replay.num_rows; }
  static void set(GroupNormArgs& args, const Replay& replay) { args.num_rows = replay.num_rows; }

  std::vector<Call> calls_;
};

// The tape that this thread is recording.
inline Tape*& recorded_tape() {
  thread_local Tape* tape = nullptr;
  return tape;
}

}  // namespace octavo
