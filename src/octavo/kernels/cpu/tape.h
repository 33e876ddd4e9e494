// The tape: calls of a step, noted down once and made again in one go.
#pragma once

#include <cstdint>
#include <cstring>
#include <mutex>
#include <variant>
#include <vector>

#include "collective.h"
#include "ops.h"

namespace octavo {

// Rows [T, size] that all ranks add up, in place.
struct AllReduceArgs {
  Collective* collective;
  void* x;
  std::int64_t rows;
  std::int64_t size;
  bool is_float32;
};

// Rows that are kept of those of the step: x [T] -> out [W].
struct KeepRowsArgs {
  const char* x;
  std::int64_t row_bytes;
  char* out;
  std::int64_t num_kept;     // W, of a step
  const std::int64_t* kept;  // [W], of a step; null: the first W
};

// Calls that were noted down instead of made. `replay` makes them with another number of rows and another step: T rows,
// and W of them behind the first that are kept. A step is told once for each KV group.
class Tape {
 public:
  using Steps = std::vector<AttentionStep>;

  template <class Args>
  void add(const Args& args) {
    calls_.emplace_back(args);
  }

  std::size_t size() const { return calls_.size(); }

  void replay(const Ops& ops, const LayerOps& layer_ops, Pool& pool, std::int64_t num_rows, const Steps& steps) const {
    for (const Call& call : calls_) {
      std::visit([&](auto args) { make(ops, layer_ops, pool, set(args, num_rows, steps)); }, call);
      if (std::holds_alternative<KeepRowsArgs>(call)) num_rows = steps[0].num_kept;
    }
  }

 private:
  using Call = std::variant<LinearArgs, MlpArgs, MoeArgs, NormArgs, AttentionArgs, AllReduceArgs, KeepRowsArgs>;

  static AttentionArgs set(AttentionArgs args, std::int64_t, const Steps& steps) {
    static_cast<AttentionStep&>(args) = steps.at(static_cast<std::size_t>(args.kv_group));
    return args;
  }
  static AllReduceArgs set(AllReduceArgs args, std::int64_t num_rows, const Steps&) {
    args.rows = num_rows;
    return args;
  }
  static KeepRowsArgs set(KeepRowsArgs args, std::int64_t, const Steps& steps) {
    args.num_kept = steps[0].num_kept, args.kept = steps[0].kept;
    return args;
  }
  template <class Args>
  static Args set(Args args, std::int64_t num_rows, const Steps&) {
    args.rows.rows = num_rows;
    return args;
  }

  static auto op_of(const Ops&, const LayerOps& layer_ops, const LinearArgs&) { return layer_ops.linear; }
  static auto op_of(const Ops&, const LayerOps& layer_ops, const MlpArgs&) { return layer_ops.mlp; }
  static auto op_of(const Ops&, const LayerOps& layer_ops, const MoeArgs&) { return layer_ops.moe; }
  static auto op_of(const Ops&, const LayerOps& layer_ops, const NormArgs&) { return layer_ops.rms_norm; }
  static auto op_of(const Ops& ops, const LayerOps&, const AttentionArgs&) { return ops.attention; }

  template <class Args>
  static void make(const Ops& ops, const LayerOps& layer_ops, Pool& pool, const Args& args) {
    const std::lock_guard<std::mutex> lock(pool.mutex());
    op_of(ops, layer_ops, args)(args, pool);
  }
  // Without the pool: other ranks may be threads of this process, and want it before they come.
  static void make(const Ops&, const LayerOps&, Pool&, const AllReduceArgs& args) {
    args.collective->all_reduce(args.x, args.rows * args.size, args.is_float32);
  }
  static void make(const Ops&, const LayerOps&, Pool&, const KeepRowsArgs& args) {
    const auto size = static_cast<std::size_t>(args.row_bytes);
    if (!args.kept) std::memcpy(args.out, args.x, size * static_cast<std::size_t>(args.num_kept));
    for (std::int64_t i = 0; args.kept && i < args.num_kept; ++i)
      std::memcpy(args.out + i * args.row_bytes, args.x + args.kept[i] * args.row_bytes, size);
  }

  std::vector<Call> calls_;
};

// The tape that a thread records.
inline Tape*& recorded_tape() {
  thread_local Tape* tape = nullptr;
  return tape;
}

}  // namespace octavo
