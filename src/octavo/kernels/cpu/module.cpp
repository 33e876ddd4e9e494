// `octavo.kernels.cpu._cpu`: the ops for Python. Not linked to torch: tensors are passed as addresses and sizes. The
// GIL is released while an op runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "arguments.h"
#include "available_ops.h"
#include "collective.h"
#include "decode_blocks.h"
#include "kernels.h"
#include "ops.h"
#include "tape.h"

namespace nb = nanobind;

namespace octavo {
namespace {

// A collective for Python. Not part of `Kernels`: a rank that waits for others must not hold the pool.
Collective* make_collective(const std::string& level, int file, std::int64_t offset, int rank, int size, int num_spins) {
  return new Collective(find_ops(level), file, offset, rank, size, num_spins);
}

void all_reduce(Collective& collective, std::uintptr_t x, std::int64_t rows, std::int64_t size, DType dtype) {
  if (recorded_tape()) return recorded_tape()->add(AllReduceArgs{collective, at<void>(x), rows, size, dtype});
  nb::gil_scoped_release released;
  collective.all_reduce(at<void>(x), rows * size, dtype);
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
  m.def("decode_blocks", [](std::int32_t type, std::uintptr_t blocks, std::int64_t count, std::uintptr_t to) {
    decode_blocks(static_cast<BlockType>(type), at<const std::uint8_t>(blocks), count, at<float>(to));
  });
  nb::enum_<DType>(m, "DType")
      .value("BFLOAT16", DType::bfloat16)
      .value("FLOAT16", DType::float16)
      .value("FLOAT32", DType::float32);
  nb::enum_<Output>(m, "Output")
      .value("PLAIN", Output::plain)
      .value("FLOAT32", Output::float32)
      .value("GATED", Output::gated)
      .value("UNGATED", Output::ungated)
      .value("GATES_AND_UPS", Output::gates_and_ups);
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def(nb::new_(&make_layer), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "block_size"_a, "sliding_window"_a,
           "query_norm"_a, "key_norm"_a, "sinks"_a, "norm_eps"_a, "scale"_a, "soft_cap"_a, "rotary"_a, "has_int8_kv"_a,
           "computes_kept_only"_a, "kv_group"_a, "normalizes_values"_a, "num_parts"_a, "gate_heads"_a, "latent_size"_a,
           "rotates_pairs"_a, "norms_behind"_a, "query_rotary"_a, "chunk_size"_a);
  nb::class_<RotaryTable>(m, "RotaryTable").def(nb::new_(&make_rotary_table));
  nb::class_<RowBlocks>(m, "RowBlocks").def(nb::new_(&make_row_blocks));
  nb::class_<AttentionStep>(m, "AttentionStep")
      .def(nb::new_(&make_step), "num_tokens"_a, "num_kept"_a, "num_blocks_per_request"_a, "rotary_tables"_a,
           "slots"_a, "query_start_loc"_a, "seq_lens"_a, "block_table"_a, "kept"_a, "visible_ends"_a,
           "all_blocks"_a, "kept_blocks"_a);
  nb::class_<GatedDelta>(m, "GatedDelta")
      .def(nb::new_(&make_gated_delta), "num_key_heads"_a, "num_value_heads"_a, "key_size"_a, "value_size"_a,
           "conv_size"_a, "conv"_a, "decay_rates"_a, "dt_bias"_a, "norm"_a, "eps"_a);
  nb::class_<ShortConv>(m, "ShortConv")
      .def(nb::new_(&make_short_conv), "num_channels"_a, "conv_size"_a, "conv"_a, "bias"_a);
  nb::class_<StateSpace>(m, "StateSpace")
      .def(nb::new_(&make_state_space), "num_groups"_a, "num_heads"_a, "key_size"_a, "value_size"_a, "conv_size"_a, "conv"_a,
           "conv_bias"_a, "decay_rates"_a, "dt_bias"_a, "skip"_a, "least_dt"_a, "most_dt"_a, "dt_scale"_a,
           "gate_scale"_a, "applies_gates"_a);
  nb::class_<GroupNormArgs>(m, "GroupNorm")
      .def(nb::new_(&make_group_norm), "x"_a, "gates"_a, "gate_stride"_a, "gate_scale"_a, "num_rows"_a, "width"_a, "group_size"_a,
           "first_column"_a, "num_groups"_a, "weight"_a, "eps"_a, "sums"_a, "only_sums"_a, "out"_a);
  nb::class_<StateStep>(m, "StateStep")
      .def(nb::new_(&make_state_step), "num_requests"_a, "query_start_loc"_a, "slots"_a, "begins"_a, "num_replayed"_a,
           "num_drafts"_a, "rows"_a);
  nb::class_<Activation>(m, "Activation").def(nb::new_(&make_activation));
  nb::class_<Fused>(m, "Fused")
      .def(nb::new_(&make_fused), "residual"_a, "norm_weight"_a, "eps"_a, "norm_offset"_a, "activation"_a,
           "is_centered"_a = false, "norm_bias"_a = 0);
  nb::class_<RowsArgs>(m, "Rows").def(nb::new_(&make_rows)).def_static("fused", &make_fused_rows);
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def(nb::new_(&make_packed))
      .def_static("of_integers", &make_packed_integers)
      .def_static("of_blocks", &make_packed_blocks)
      .def_ro("out_size", &PackedWeight::out_size);
  nb::class_<LoraSlots>(m, "LoraSlots")
      .def(nb::new_(&make_lora_slots), "down"_a, "up"_a, "ranks"_a, "count"_a, "max_rank"_a, "parts"_a);
  nb::class_<PackIntegersArgs>(m, "Integers")
      .def(nb::new_(&make_integers), "bits"_a, "group_size"_a, "is_two_level"_a, "is_rotated"_a, "mixes_blocks"_a, "in_size"_a,
           "out_size"_a, "is_gated"_a, "is_logits_head"_a)
      .def_prop_ro("packed_size", &packed_integers_size)
      .def_prop_ro("scales_size", &packed_scales_size);
  nb::class_<PackBlocksArgs>(m, "Blocks")
      .def(nb::new_(&make_blocks), "types"_a, "sizes"_a, "is_gated"_a, "row_inputs"_a, "first_input"_a, "in_size"_a,
           "span"_a)
      .def_prop_ro("packed_size", &packed_blocks_size);
  nb::class_<HeadWeights>(m, "Heads").def(nb::init<std::vector<PackedWeight>, std::int64_t>(), "linears"_a, "in_size"_a);
  nb::class_<ExpertWeights>(m, "Experts").def(nb::init<std::vector<PackedWeight>, std::vector<PackedWeight>>());
  nb::class_<Routing>(m, "Routing")
      .def(nb::new_(&make_routing), "num_experts"_a, "top_k"_a, "renormalizes"_a, "has_shared"_a,
           "chooses_by_logit"_a, "is_softmax"_a, "num_groups"_a, "top_groups"_a, "group_best"_a, "correction"_a, "scale"_a,
           "epsilon"_a, "gates_shared"_a);
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
      .def(nb::init<const std::string&, int, DType>(), "level"_a, "num_threads"_a, "dtype"_a)
      .def_prop_ro("level", &Kernels::level)
      .def_prop_ro("num_threads", &Kernels::num_threads)
      .def("pack_linear", &Kernels::pack_linear)
      .def("quantize", &Kernels::quantize)
      .def("pack_weight", &Kernels::pack_weight)
      .def("pack_integers", &Kernels::pack_integers)
      .def("pack_blocks", &Kernels::pack_blocks)
      .def("linear", &Kernels::linear)
      .def("head_linears", &Kernels::head_linears)
      .def("argmax", &Kernels::argmax)
      .def("mlp", &Kernels::mlp)
      .def("activate", &Kernels::activate)
      .def("gated_product", &Kernels::gated_product)
      .def("scaled_sum", &Kernels::scaled_sum)
      .def("add_lora", &Kernels::add_lora)
      .def("route", &Kernels::route)
      .def("expert_rows", &Kernels::expert_rows)
      .def("combine_experts", &Kernels::combine_experts)
      .def("moe", &Kernels::moe)
      .def("rms_norm", &Kernels::rms_norm)
      .def("part_squares", &Kernels::part_squares)
      .def("scale_parts", &Kernels::scale_parts)
      .def("keep_rows", &Kernels::keep_rows)
      .def("select_columns", &Kernels::select_columns)
      .def("packed_rows", &Kernels::packed_rows)
      .def("draw", &Kernels::draw)
      .def("begin_recording", &Kernels::begin_recording)
      .def("end_recording", &Kernels::end_recording)
      .def("replay", &Kernels::replay)
      .def("start_phases", &Kernels::start_phases)
      .def("phase_seconds", &Kernels::phase_seconds)
      .def("gated_delta", &Kernels::gated_delta)
      .def("short_conv", &Kernels::short_conv)
      .def("state_space", &Kernels::state_space)
      .def("norm_groups", &Kernels::norm_groups)
      .def("gate", &Kernels::gate)
      .def("latent_attention", &Kernels::latent_attention)
      .def("attention", &Kernels::attention);
}
