// `octavo.kernels.cpu._cpu`: the ops for Python. Not linked to torch: tensors come as addresses and sizes. The GIL is free
// while an op runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "collective.h"
#include "level.h"
#include "ops.h"

namespace nb = nanobind;

namespace octavo {

std::int64_t packed_size(std::int64_t in_size, std::int64_t out_size, bool is_gated) {
  const std::int64_t outputs_per_panel = is_gated ? 16 : 32;
  return (out_size + outputs_per_panel - 1) / outputs_per_panel * ((in_size + 31) / 32) * 1024;
}

static std::int64_t num_panels(const PackIntegersArgs& args) {
  const std::int64_t outputs_per_panel = args.is_gated ? 16 : 32;
  return (args.out_size + outputs_per_panel - 1) / outputs_per_panel;
}

std::int64_t packed_integers_size(const PackIntegersArgs& args) {
  const std::int64_t k_tile_bytes = 256 * args.form.bits + (args.form.is_nested ? 64 : 0);
  return num_panels(args) * ((args.in_size + 63) / 64) * k_tile_bytes;
}

std::int64_t packed_scales_size(const PackIntegersArgs& args) {
  const std::int64_t group_size = args.form.group_size ? args.form.group_size : args.in_size;
  return num_panels(args) * ((args.in_size + group_size - 1) / group_size) * 32;
}

namespace {

// The levels that this processor has, best first.
std::vector<const Ops*> available_ops() {
  std::vector<const Ops*> ops;
#if defined(__x86_64__)
  const Level best = best_level();
  if (best >= Level::amx) ops.push_back(&ops_amx);
  if (best >= Level::avx512) ops.push_back(&ops_avx512);
  if (best >= Level::avx512_vnni) ops.push_back(&ops_avx512_vnni);
  if (best >= Level::avx2_vnni) ops.push_back(&ops_avx2_vnni);
  if (best >= Level::avx2) ops.push_back(&ops_avx2);
#endif
  ops.push_back(&ops_portable);
  return ops;
}

const Ops& find_ops(const std::string& level) {
  for (const Ops* ops : available_ops())
    if (level == ops->name) return *ops;
  throw std::invalid_argument("this processor has no level " + level);
}

// Addresses are integers for Python.
template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

AttentionLayer make_layer(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                          std::int64_t block_size, std::int64_t sliding_window, std::uintptr_t query_norm,
                          std::uintptr_t key_norm, float norm_eps, float scale, bool is_float32,
                          bool has_int8_kv, bool answers_kept) {
  if (head_dim > kMaxHeadDim) throw std::invalid_argument("heads are too large");
  return {num_heads, num_kv_heads, head_dim, block_size, sliding_window, at<const float>(query_norm),
          at<const float>(key_norm), norm_eps, scale, is_float32, has_int8_kv, answers_kept};
}

RowBlocks make_row_blocks(std::int64_t count, std::uintptr_t of) { return {count, at<const std::int32_t>(of)}; }

AttentionStep make_step(std::int64_t num_tokens, std::int64_t num_kept, std::int64_t num_blocks_per_request,
                        std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t slots, std::uintptr_t query_start_loc,
                        std::uintptr_t seq_lens, std::uintptr_t block_table, std::uintptr_t kept,
                        const RowBlocks& all_blocks, const RowBlocks& kept_blocks) {
  return {num_tokens, num_kept, num_blocks_per_request, at<const float>(cos), at<const float>(sin),
          at<const std::int64_t>(slots), at<const std::int32_t>(query_start_loc), at<const std::int32_t>(seq_lens),
          at<const std::int32_t>(block_table), at<const std::int64_t>(kept), all_blocks, kept_blocks};
}

RowsArgs make_rows(std::uintptr_t x, std::int64_t rows, std::int64_t size, std::uintptr_t residual,
                   std::uintptr_t norm_weight, float eps, std::uintptr_t total) {
  return {at<void>(x), rows, size, at<void>(residual), at<void>(norm_weight), eps, at<void>(total)};
}

PackIntegersArgs make_integers(int bits, std::int64_t group_size, bool is_nested, std::int64_t in_size,
                               std::int64_t out_size, bool is_gated) {
  const bool is_known = (bits == 8 || bits == 4) && (group_size == 0 || group_size == 32 || group_size == 64 || group_size == 128);
  if (!is_known) throw std::invalid_argument("integers have 8 or 4 bits, and groups of 32, 64, 128 or 0 (all)");
  if (is_nested && (bits != 4 || group_size != 0)) throw std::invalid_argument("nested integers have 4 bits and one scale");
  // Sums of products of 8 bits stay within 32.
  if (in_size > std::int64_t{1} << 17) throw std::invalid_argument("a map of integers takes at most 131072 inputs");
  PackIntegersArgs args = {};
  args.form.bits = bits, args.form.group_size = group_size, args.form.is_nested = is_nested;
  args.in_size = in_size, args.out_size = out_size, args.is_gated = is_gated;
  return args;
}

PackedWeight make_packed_integers(const PackIntegersArgs& args, std::uintptr_t values, std::uintptr_t scales,
                                  std::uintptr_t offsets, std::uintptr_t bias) {
  return {args.out_size, nullptr, at<const float>(bias),
          {args.form.bits, args.form.is_nested, args.form.group_size, at<const std::uint8_t>(values), at<const float>(scales),
           at<const float>(offsets)}};
}

PackedWeight make_packed(std::int64_t out_size, std::uintptr_t weight, std::uintptr_t bias) {
  return {out_size, at<void>(weight), at<const float>(bias), {}};
}

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

// The weights of experts, side by side; those who compute with them keep this.
class ExpertWeights {
 public:
  ExpertWeights(std::vector<PackedWeight> gate_up, std::vector<PackedWeight> down)
      : gate_up_(std::move(gate_up)), down_(std::move(down)) {
    if (gate_up_.size() != down_.size()) throw std::invalid_argument("an expert has two maps");
  }

  Experts experts() const {
    std::int64_t most = 0;
    for (const PackedWeight& weight : gate_up_) most = std::max(most, weight.out_size);
    return {static_cast<std::int64_t>(gate_up_.size()), most, gate_up_.data(), down_.data()};
  }

 private:
  std::vector<PackedWeight> gate_up_, down_;
};

Routing make_routing(std::int64_t num_experts, std::int64_t top_k, bool renormalises, bool has_shared) {
  if (top_k < 1 || top_k > num_experts) throw std::invalid_argument("a token chooses at least one expert, at most all");
  return {num_experts, top_k, renormalises, has_shared};
}

// Calls that were noted down instead of made. `replay` makes them with another number of rows and another step: T rows,
// and W of them behind the first that are kept.
class Tape {
 public:
  template <class Args>
  void add(const Args& args) {
    calls_.emplace_back(args);
  }

  std::size_t size() const { return calls_.size(); }

  void replay(const Ops& ops, const MapOps& maps, Pool& pool, std::int64_t num_rows, const AttentionStep& step) const {
    for (const Call& call : calls_) {
      std::visit([&](auto args) { make(ops, maps, pool, set(args, num_rows, step)); }, call);
      if (std::holds_alternative<KeepRowsArgs>(call)) num_rows = step.num_kept;
    }
  }

 private:
  using Call = std::variant<LinearArgs, MlpArgs, MoeArgs, NormArgs, AttentionArgs, AllReduceArgs, KeepRowsArgs>;

  static AttentionArgs set(AttentionArgs args, std::int64_t, const AttentionStep& step) {
    static_cast<AttentionStep&>(args) = step;
    return args;
  }
  static AllReduceArgs set(AllReduceArgs args, std::int64_t num_rows, const AttentionStep&) {
    args.rows = num_rows;
    return args;
  }
  static KeepRowsArgs set(KeepRowsArgs args, std::int64_t, const AttentionStep& step) {
    args.num_kept = step.num_kept, args.kept = step.kept;
    return args;
  }
  template <class Args>
  static Args set(Args args, std::int64_t num_rows, const AttentionStep&) {
    args.rows.rows = num_rows;
    return args;
  }

  static auto op_of(const Ops&, const MapOps& maps, const LinearArgs&) { return maps.linear; }
  static auto op_of(const Ops&, const MapOps& maps, const MlpArgs&) { return maps.mlp; }
  static auto op_of(const Ops&, const MapOps& maps, const MoeArgs&) { return maps.moe; }
  static auto op_of(const Ops&, const MapOps& maps, const NormArgs&) { return maps.rms_norm; }
  static auto op_of(const Ops& ops, const MapOps&, const AttentionArgs&) { return ops.attention; }

  template <class Args>
  static void make(const Ops& ops, const MapOps& maps, Pool& pool, const Args& args) {
    const std::lock_guard<std::mutex> lock(pool.mutex());
    op_of(ops, maps, args)(args, pool);
  }
  // Without the pool: other ranks may be threads of this process, and want it before they come.
  static void make(const Ops&, const MapOps&, Pool&, const AllReduceArgs& args) {
    args.collective->all_reduce(args.x, args.rows * args.size, args.is_float32);
  }
  static void make(const Ops&, const MapOps&, Pool&, const KeepRowsArgs& args) {
    const auto size = static_cast<std::size_t>(args.row_bytes);
    if (!args.kept) std::memcpy(args.out, args.x, size * static_cast<std::size_t>(args.num_kept));
    for (std::int64_t i = 0; args.kept && i < args.num_kept; ++i)
      std::memcpy(args.out + i * args.row_bytes, args.x + args.kept[i] * args.row_bytes, size);
  }

  std::vector<Call> calls_;
};

// The tape that a thread records.
Tape*& recorded_tape() {
  thread_local Tape* tape = nullptr;
  return tape;
}

// One level's ops, maps in one dtype, and the threads that run them.
class Kernels {
 public:
  Kernels(const std::string& level, int num_threads, bool is_float32)
      : ops_(find_ops(level)),
        maps_(is_float32 ? *ops_.float32 : ops_.bfloat16),
        packed_rows_(is_float32 ? octavo::packed_rows<float> : octavo::packed_rows<bf16>),
        pool_(num_threads) {}

  std::string level() const { return ops_.name; }
  int num_threads() const { return pool_.num_threads(); }

  void pack_linear(std::uintptr_t weight, std::int64_t in_size, std::int64_t out_size, bool is_gated,
                   std::uintptr_t packed) {
    run(maps_.pack_linear, PackArgs{at<void>(weight), in_size, out_size, is_gated, at<void>(packed)});
  }

  void quantise(PackIntegersArgs args, std::uintptr_t weight, std::uintptr_t values, std::uintptr_t scales,
                std::uintptr_t multipliers) {
    args.multipliers = at<std::int8_t>(multipliers);
    args.weight = at<const bf16>(weight), args.values = at<std::int8_t>(values), args.scales = at<float>(scales);
    run_now(ops_.quantise, args);
  }

  void pack_weight(PackIntegersArgs args, std::uintptr_t weight, std::uintptr_t packed, std::uintptr_t packed_scales) {
    args.weight = at<const bf16>(weight);
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

  void linear(const RowsArgs& rows, const PackedWeight& packed, Output output, std::uintptr_t out) {
    run(maps_.linear, LinearArgs{rows, packed, output, at<void>(out)});
  }

  void largest(const RowsArgs& rows, const PackedWeight& packed, std::uintptr_t out) {
    run_now(maps_.largest, LargestArgs{rows, packed, at<Largest>(out)});
  }

  void mlp(const RowsArgs& rows, const PackedWeight& gate_up, const PackedWeight& down, std::uintptr_t out) {
    run(maps_.mlp, MlpArgs{rows, gate_up, down, at<void>(out)});
  }

  void route(const RowsArgs& rows, const PackedWeight& router, const Routing& routing, std::uintptr_t expert_ids,
             std::uintptr_t weights) {
    run_now(maps_.route, RouteArgs{rows, router, routing, at<std::int64_t>(expert_ids), at<float>(weights)});
  }

  void expert_rows(const RowsArgs& rows, const ExpertWeights& experts, std::int64_t num_pairs, std::uintptr_t token_ids,
                   std::uintptr_t expert_ids, std::uintptr_t out) {
    run_now(maps_.expert_rows, ExpertRowsArgs{rows, experts.experts(), num_pairs, at<const std::int64_t>(token_ids),
                                              at<const std::int64_t>(expert_ids), at<void>(out)});
  }

  void combine_experts(std::uintptr_t answers, std::uintptr_t weights, std::int64_t num_tokens, std::int64_t num_choices,
                       std::int64_t size, std::uintptr_t out) {
    run_now(maps_.combine_experts,
            CombineArgs{at<void>(answers), at<const float>(weights), num_tokens, num_choices, size, at<void>(out)});
  }

  void moe(const RowsArgs& rows, const PackedWeight& router, const Routing& routing, const ExpertWeights& experts,
           std::uintptr_t load, std::uintptr_t out) {
    run(maps_.moe, MoeArgs{rows, router, routing, experts.experts(), at<std::int64_t>(load), at<void>(out)});
  }

  void rms_norm(const RowsArgs& rows, std::uintptr_t out) { run(maps_.rms_norm, NormArgs{rows, at<void>(out)}); }

  void attention(const AttentionStep& step, const AttentionLayer& layer, std::uintptr_t qkv, std::uintptr_t keys,
                 std::uintptr_t values, std::uintptr_t out) {
    run(ops_.attention, AttentionArgs{layer, step, at<void>(qkv), at<void>(out), at<void>(keys), at<void>(values)});
  }

  void keep_rows(std::uintptr_t x, std::int64_t row_bytes, std::uintptr_t out) {
    if (!recorded_tape()) throw std::logic_error("which rows are kept is known to a tape alone");
    recorded_tape()->add(KeepRowsArgs{at<const char>(x), row_bytes, at<char>(out), 0, nullptr});
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
    octavo::draw(*ops_.draw, args, pool_);
  }

  void begin_recording(Tape& tape) { recorded_tape() = &tape; }
  void end_recording() { recorded_tape() = nullptr; }

  void replay(const Tape& tape, std::int64_t num_rows, const AttentionStep& step) {
    nb::gil_scoped_release released;
    tape.replay(ops_, maps_, pool_, num_rows, step);
  }

 private:
  template <class Args>
  void run_now(void (*op)(const Args&, Pool&), const Args& args) {
    nb::gil_scoped_release released;
    const std::lock_guard<std::mutex> lock(pool_.mutex());
    op(args, pool_);
  }

  template <class Args>
  void run(void (*op)(const Args&, Pool&), const Args& args) {
    if constexpr (!std::is_same_v<Args, PackArgs>) {
      if (recorded_tape()) return recorded_tape()->add(args);
    }
    nb::gil_scoped_release released;
    const std::lock_guard<std::mutex> lock(pool_.mutex());
    op(args, pool_);
  }

  const Ops& ops_;
  const MapOps& maps_;
  void (*packed_rows_)(const PackedRowsArgs&, Pool&);
  Pool pool_;
};

// A collective for Python. Not by way of `Kernels`: a rank that waits for others holds no pool back.
Collective* make_collective(const std::string& level, int file, std::int64_t offset, int rank, int size, int num_spins) {
  return new Collective(find_ops(level), file, offset, rank, size, num_spins);
}

void all_reduce(Collective& collective, std::uintptr_t x, std::int64_t rows, std::int64_t size, bool is_float32) {
  if (recorded_tape()) return recorded_tape()->add(AllReduceArgs{&collective, at<void>(x), rows, size, is_float32});
  nb::gil_scoped_release released;
  collective.all_reduce(at<void>(x), rows * size, is_float32);
}

void all_gather(Collective& collective, std::uintptr_t x, std::uintptr_t out, std::int64_t rows,
                const std::vector<std::int64_t>& row_bytes) {
  nb::gil_scoped_release released;
  collective.all_gather(at<void>(x), at<void>(out), rows, row_bytes);
}

void all_to_all(Collective& collective, std::uintptr_t x, std::uintptr_t out, std::int64_t row_bytes,
                const std::vector<std::vector<std::int64_t>>& counts) {
  nb::gil_scoped_release released;
  collective.all_to_all(at<void>(x), at<void>(out), row_bytes, counts);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_cpu, m) {
  using namespace octavo;
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // kernels hold threads and live as long as the process
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const Ops* ops : available_ops()) names.emplace_back(ops->name);
    return names;
  });
  m.def("packed_size", &packed_size);
  nb::enum_<Output>(m, "Output")
      .value("PLAIN", Output::plain)
      .value("FLOAT32", Output::float32)
      .value("GATED", Output::gated);
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def(nb::new_(&make_layer), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "block_size"_a, "sliding_window"_a,
           "query_norm"_a, "key_norm"_a, "norm_eps"_a, "scale"_a,
           "is_float32"_a, "has_int8_kv"_a, "answers_kept"_a);
  nb::class_<RowBlocks>(m, "RowBlocks").def(nb::new_(&make_row_blocks));
  nb::class_<AttentionStep>(m, "AttentionStep")
      .def(nb::new_(&make_step), "num_tokens"_a, "num_kept"_a, "num_blocks_per_request"_a, "cos"_a, "sin"_a,
           "slots"_a, "query_start_loc"_a, "seq_lens"_a, "block_table"_a, "kept"_a, "all_blocks"_a, "kept_blocks"_a);
  nb::class_<RowsArgs>(m, "Rows").def(nb::new_(&make_rows));
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def(nb::new_(&make_packed))
      .def_static("of_integers", &make_packed_integers)
      .def_ro("out_size", &PackedWeight::out_size);
  nb::class_<PackIntegersArgs>(m, "Integers")
      .def(nb::new_(&make_integers), "bits"_a, "group_size"_a, "is_nested"_a, "in_size"_a, "out_size"_a,
           "is_gated"_a)
      .def_prop_ro("packed_size", &packed_integers_size)
      .def_prop_ro("scales_size", &packed_scales_size);
  nb::class_<ExpertWeights>(m, "Experts").def(nb::init<std::vector<PackedWeight>, std::vector<PackedWeight>>());
  nb::class_<Routing>(m, "Routing")
      .def(nb::new_(&make_routing), "num_experts"_a, "top_k"_a, "renormalises"_a, "has_shared"_a);
  nb::class_<Tape>(m, "Tape").def(nb::init<>()).def("__len__", &Tape::size);
  nb::class_<Collective>(m, "Collective")
      .def(nb::new_(&make_collective))
      .def_static("memory_size", &Collective::memory_size)
      .def("all_reduce", &all_reduce)
      .def("all_gather", &all_gather)
      .def("exchange_counts", &Collective::exchange_counts, nb::call_guard<nb::gil_scoped_release>())
      .def("all_to_all", &all_to_all)
      .def("barrier", &Collective::barrier, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<const std::string&, int, bool>(), "level"_a, "num_threads"_a, nb::kw_only(), "is_float32"_a)
      .def_prop_ro("level", &Kernels::level)
      .def_prop_ro("num_threads", &Kernels::num_threads)
      .def("pack_linear", &Kernels::pack_linear)
      .def("quantise", &Kernels::quantise)
      .def("pack_weight", &Kernels::pack_weight)
      .def("pack_integers", &Kernels::pack_integers)
      .def("linear", &Kernels::linear)
      .def("largest", &Kernels::largest)
      .def("mlp", &Kernels::mlp)
      .def("route", &Kernels::route)
      .def("expert_rows", &Kernels::expert_rows)
      .def("combine_experts", &Kernels::combine_experts)
      .def("moe", &Kernels::moe)
      .def("rms_norm", &Kernels::rms_norm)
      .def("keep_rows", &Kernels::keep_rows)
      .def("packed_rows", &Kernels::packed_rows)
      .def("draw", &Kernels::draw)
      .def("begin_recording", &Kernels::begin_recording)
      .def("end_recording", &Kernels::end_recording)
      .def("replay", &Kernels::replay)
      .def("attention", &Kernels::attention);
}
