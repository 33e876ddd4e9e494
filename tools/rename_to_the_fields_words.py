"""Bring a tree of Octavo from its private dialect to the field's words. Usage: rename.py ROOT. Idempotent.

Renames classes, functions, attributes, variables and files over src, tests, benchmarks, docs and C++; then `ruff format`
and `ruff check --fix --select I`. Tables below; what a table says of files is said of their OLD paths (and holds for
their new ones), so that the script may run on any branch, before or after files have moved.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from fnmatch import fnmatch
from pathlib import Path

# -- files: old -> new ------------------------------------------------------------------------------------------------
MOVES = {
    "src/octavo/scheduler/draft.py": "src/octavo/scheduler/step_builder.py",
    "src/octavo/scheduler/progress.py": "src/octavo/scheduler/step_update.py",
    "src/octavo/scheduler/shares.py": "src/octavo/scheduler/running_scheduler.py",
    "src/octavo/sampling/draw.py": "src/octavo/sampling/backend.py",
    "src/octavo/sampling/native_draw.py": "src/octavo/sampling/native_backend.py",
    "src/octavo/sampling/edits.py": "src/octavo/sampling/logits_processors.py",
    "src/octavo/sampling/asked_edits.py": "src/octavo/sampling/logits_processor_params.py",
    "src/octavo/sampling/device_edits.py": "src/octavo/sampling/device_logits_processors.py",
    "src/octavo/kernels/triton/edit.py": "src/octavo/kernels/triton/process_logits.py",
    "src/octavo/worker/edit_record.py": "src/octavo/worker/logits_processor_record.py",
    "src/octavo/worker/step_wishes.py": "src/octavo/worker/sampling_metadata.py",
    "src/octavo/worker/largest_step.py": "src/octavo/worker/profile_run.py",
    "src/octavo/layers/dealt_experts.py": "src/octavo/layers/expert_parallel.py",
    "src/octavo/structured/thoughts.py": "src/octavo/structured/reasoning.py",
    "src/octavo/server/openai/form.py": "src/octavo/server/openai/structured_output.py",
    "src/octavo/server/openai/wishes.py": "src/octavo/server/openai/response_options.py",
    "src/octavo/kernels/cpu/largest.inc.h": "src/octavo/kernels/cpu/argmax.inc.h",
    "src/octavo/kernels/cpu/integer_nested.inc.h": "src/octavo/kernels/cpu/integer_two_level.inc.h",
    "tests/sampling/test_edits.py": "tests/sampling/test_logits_processors.py",
    "tests/sampling/test_device_edits.py": "tests/sampling/test_device_logits_processors.py",
    "tests/sampling/test_native_draw.py": "tests/sampling/test_native_backend.py",
    "tests/worker/test_edit_record.py": "tests/worker/test_logits_processor_record.py",
    "tests/kernels/test_largest_logits.py": "tests/kernels/test_logits_argmax.py",
    "tests/kernels/test_row_invariance.py": "tests/kernels/test_batch_invariance.py",
    "tests/kernels/test_float32_maps.py": "tests/kernels/test_float32_linear.py",
    "tests/structured/test_thoughts.py": "tests/structured/test_reasoning.py",
    "tests/end_to_end/test_thoughts.py": "tests/end_to_end/test_reasoning.py",
    "tests/server/test_peer_behaviours.py": "tests/server/test_peer_behaviors.py",
    "benchmarks/offline/neighbour.py": "benchmarks/offline/neighbor.py",
}

# -- names that two modules share: renamed where they are imported from the module, and in the module itself -----------
SHARED_NAMES = [  # (module's old path, old name, new name)
    ("src/octavo/worker/model_runner.py", "ModelRunner", "RankModelRunner"),
    ("src/octavo/server/admission.py", "Admission", "AdmissionController"),
    ("src/octavo/layers/attention.py", "AttentionStep", "AttentionMetadata"),
    ("src/octavo/layers/moe.py", "Router", "ExpertRouter"),
    ("src/octavo/kernels/dispatch.py", "Routes", "ExpertRoutes"),
    ("src/octavo/kernels/triton/low_bit_matmul.py", "Tiling", "MatmulTiling"),
    ("src/octavo/scheduler/shares.py", "Share", "RunningTokens"),
    ("src/octavo/sampling/device_draw.py", "Wishes", "SamplingMetadata"),
    ("src/octavo/server/openai/wishes.py", "Wishes", "ResponseOptions"),
    ("src/octavo/sampling/draw.py", "Draws", "SamplerBackend"),
    ("src/octavo/sampling/draw.py", "Drawn", "SampledTokens"),
    ("src/octavo/engine/core.py", "Flight", "PendingStep"),
    ("src/octavo/scheduler/admission.py", "Refusal", "Rejection"),
]

# -- names of one meaning, wherever they stand: code, comments, docs; word boundaries are added -------------------------
ANYWHERE = {
    # invariance
    "is_row_invariant": "is_batch_invariant",
    "test_row_invariance": "test_batch_invariance",
    # the step
    "StepDraft": "StepBuilder",
    "StepNews": "StepUpdate",
    "GrammarNews": "GrammarUpdate",
    "PromptNews": "PromptLogprobsUpdate",
    "is_news": "is_new",
    "_on_news": "_on_update",
    "RunningShares": "RunningScheduler",
    "tells_tokens": "sends_tokens",
    "_tells_tokens": "_sends_tokens",
    "booked_s": "scheduled_s",
    "_landed_s": "_last_output_s",
    "_is_still_refused": "_is_still_rejected",
    "_flights": "_pending_steps",
    "_most_flights": "_max_steps_in_flight",
    "_take_off": "_submit_steps",
    "_land": "_finish_oldest",
    "_land_all": "_finish_all",
    "_landed": "_finished_outputs",
    "_next_order": "_schedule_next",
    "_decode_order": "_decode_scheduler_output",
    "StepsUnderWay": "StepsInFlight",
    "LaterAnswer": "DeferredOutput",
    "no_answer": "empty_output",
    "answers_kept": "computes_kept_only",
    # blocks
    "_block_by_name": "_block_by_hash",
    "set_name": "set_hash",
    "forget_names": "forget_hashes",
    "forget_all_names": "forget_all_hashes",
    "name_blocks": "hash_blocks",
    "name_full_blocks": "hash_full_blocks",
    "_name_prompt_blocks": "_hash_prompt_blocks",
    "named_blocks": "hashed_blocks",
    "_named_blocks": "_hashed_blocks",
    "num_named": "num_hashed",
    "_block_names": "_block_hashes",
    # sampling
    "StepWishes": "StepSamplingMetadata",
    "_Wishes": "_SamplingMetadata",
    "FLOAT_WISHES": "FLOAT_COLUMNS",
    "INTEGER_WISHES": "INTEGER_COLUMNS",
    "wishes_on_device": "metadata_on_device",
    "wishes_of": "metadata_of",
    "RowEdits": "RowLogitsProcessors",
    "AskedEdits": "LogitsProcessorParams",
    "asked_of": "processor_params_of",
    "edits_of": "processors_of",
    "edits_on_device": "processors_on_device",
    "_edits_on_device": "_processors_on_device",
    "edit_arrays": "processor_arrays",
    "edit_on_device": "process_logits_on_device",
    "edit_by_torch": "process_logits_by_torch",
    "_edit_by_triton": "_process_logits_by_triton",
    "_edit_kernel": "_process_logits_kernel",
    "EditRecord": "LogitsProcessorRecord",
    "is_edited": "has_processors",
    "_EDITED_SLICE": "_PROCESSED_SLICE",
    "TorchDraws": "TorchSamplerBackend",
    "NativeDraws": "NativeSamplerBackend",
    "largest_left": "max_processed_logit",
    "of_largest": "of_argmax",
    "want_largest": "need_argmax_only",
    "wants_largest": "needs_argmax_only",
    "takes_largest": "needs_argmax_only",
    "take_largest": "take_argmax",
    "largest_logits": "logits_argmax",
    "_largest_logits": "_logits_argmax",
    "LargestSteps": "ProfileRun",
    "_penalise": "_penalize",
    "_is_penalised": "_is_penalized",
    # constraints, reasoning
    "FormChecker": "StructuredOutputChecker",
    "check_form": "check_structured_output",
    "_check_forms": "_check_structured_outputs",
    "_compile_form": "_compile_constraint",
    "compile_form": "compile_constraint",
    "form_complete": "grammar_complete",
    "form_paths": "structured_output_paths",
    "requested_form": "requested_structured_output",
    "_KILLED_BY_A_FORM": "_KILLED_BY_A_CONSTRAINT",
    "MAX_THOUGHT_TOKENS": "MAX_REASONING_TOKENS",
    "thought_tags_are_tokens": "reasoning_tags_are_tokens",
    "has_thoughts": "has_reasoning",
    "_read_thoughts": "_read_reasoning",
    "_with_thoughts": "_with_reasoning",
    # parallelism
    "DealtExperts": "ExpertParallelMoE",
    "_dealt_experts": "_expert_parallel",
    "_sliced_experts": "_tensor_parallel",
    "deals_experts": "is_expert_parallel",
    "part_of_rank": "sharded_config",
    "parts_elsewhere": "parts_on_other_ranks",
    "ExpertElsewhere": "ExpertOnOtherRank",
    "MapElsewhere": "LinearOnOtherRank",
    "Undealt": "Unbalanced",
    "is_dealt": "is_balanced",
    "_deal_few": "_assign_few",
    "_deal_many": "_assign_many",
    "deal_out": "assign_programs",
    "_wait_beside": "_receive_alongside",
    # linear layers
    "LinearMaps": "LinearShapes",
    "layer_maps": "layer_linears",
    "_map_kernels": "_linear_kernels",
    "MapOps": "LayerOps",
    "maps_": "layer_ops_",
    "is_mlp_its_maps": "is_mlp_its_linears",
    "by_maps": "by_linears",
    # maxima
    "most_steps_in_flight": "max_steps_in_flight",
    "num_most_in_flight": "max_num_in_flight",
    "most_blocks": "max_blocks",
    "most_outputs": "max_outputs",
    "most_useful": "max_useful",
    "most_groups": "max_groups",
    "most_intermediate": "max_intermediate",
    "most_rows": "max_rows",
    "most_rows_": "max_rows_",
    "most_size": "max_size",
    "most_spans_": "max_spans_",
    "most_tiles": "max_tiles",
    "most_new": "max_new",
    "most_some": "max_some",
    "most_mappings": "max_mappings",
    "_most_ahead": "_max_ahead",
    "_MOST_AHEAD_BYTES": "_MAX_AHEAD_BYTES",
    "_MOST_AHEAD_SHARE": "_MAX_AHEAD_SHARE",
    "_MOST_AHEAD_TOKENS": "_MAX_AHEAD_TOKENS",
    "_MOST_AT_ONCE": "_MAX_AT_ONCE",
    "_MOST_BIASES": "_MAX_BIASES",
    "_MOST_FEW": "_MAX_FEW",
    "_MOST_SOME": "_MAX_SOME",
    "_MOST_IDS": "_MAX_IDS",
    "_MOST_KEPT": "_MAX_KEPT",
    "_MOST_SENDS": "_MAX_SENDS",
    "_MOST_STRETCH": "_MAX_STRETCH",
    "_SMALL_MOST": "_SMALL_MAX",
    "MOST_GRAPHS": "MAX_GRAPHS",
    "MOST_HEAD_ROWS": "MAX_HEAD_ROWS",
    "MOST_ROWS": "MAX_ROWS",
    # two-level integers
    "is_nested": "is_two_level",
    "NESTED_GROUP_SIZE": "TWO_LEVEL_GROUP_SIZE",
    "_to_nested": "_to_two_level",
    "integer_nested": "integer_two_level",
    "expand_nested": "expand_two_level",
    "kFewRowsNested": "kFewRowsTwoLevel",
    "kNestedBytes": "kTwoLevelBytes",
    "kNestedGroup": "kTwoLevelGroup",
    "kNestedTileBytes": "kTwoLevelTileBytes",
    "multiply_nested_panel": "multiply_two_level_panel",
    "nested_value": "two_level_value",
    "nested_values": "two_level_values",
    "NestedUnit": "TwoLevelUnit",
    "put_nested_column": "put_two_level_column",
    "quantise_nested_group": "quantize_two_level_group",
    "quantise_nested_output": "quantize_two_level_output",
    # argmax in C++
    "LargestArgs": "ArgmaxArgs",
    "integer_largest": "integer_argmax",
    "largest_of_any_weight": "argmax_of_any_weight",
    # records
    "note_admitted": "record_admitted",
    "note_blocks": "record_blocks",
    "note_end": "record_end",
    "note_finished": "record_finished",
    "note_first_token": "record_first_token",
    "note_prompt_logprobs": "record_prompt_logprobs",
    "note_reply": "record_reply",
    "note_request": "record_request",
    "note_step": "record_step",
    "note_token": "record_token",
    "_note_events": "_record_events",
}

# -- names that are common words: only as names in the code (f-strings and parametrize included) of these files ---------
SCHEDULER_OUTPUT_FILES = (
    "benchmarks/gpu/engine.py",
    "benchmarks/host/*.py",
    "src/octavo/engine/core.py",
    "src/octavo/executor/base.py",
    "src/octavo/executor/distributed.py",
    "src/octavo/executor/steps.py",
    "src/octavo/executor/uniproc.py",
    "src/octavo/executor/ray_executor.py",
    "src/octavo/scheduler/progress.py",
    "src/octavo/testing.py",
    "src/octavo/worker/[a-u]*.py",
    "src/octavo/worker/warmup.py",
    "src/octavo/worker/worker.py",
    "src/octavo/worker/wrapper.py",
    "tests/engine/conftest.py",
    "tests/executor/*.py",
    "tests/ray/*.py",
    "tests/scheduler/test_constrained.py",
    "tests/scheduler/test_doubles.py",
    "tests/scheduler/test_ends.py",
    "tests/scheduler/test_pace.py",
    "tests/scheduler/test_preemption.py",
    "tests/scheduler/test_prefix_reuse.py",
    "tests/scheduler/test_random_schedules.py",
    "tests/scheduler/test_starvation.py",
    "tests/scheduler/test_steps.py",
    "tests/worker/*.py",
)
MODEL_OUTPUT_FILES = (
    "benchmarks/host/*.py",
    "src/octavo/engine/core.py",
    "src/octavo/executor/*.py",
    "src/octavo/scheduler/progress.py",
    "src/octavo/scheduler/scheduler.py",
    "src/octavo/testing.py",
    "src/octavo/worker/*.py",
    "tests/executor/test_multiproc.py",
    "tests/ray/test_ray.py",
    "tests/scheduler/*.py",
    "tests/worker/test_overlapped_runner.py",
    "tests/worker/threaded_ranks.py",
)
CONSTRAINT_FILES = (
    "src/octavo/engine/async_llm_engine.py",
    "src/octavo/engine/input_processor.py",
    "src/octavo/engine/grammars.py",
    "src/octavo/server/openai/*.py",
    "src/octavo/server/openai/parsers/*.py",
    "src/octavo/structured/*.py",
    "src/octavo/structured_output.py",
    "tests/end_to_end/test_structured.py",
    "tests/end_to_end/test_thoughts.py",
    "tests/server/*.py",
    "tests/server/openai/*.py",
    "tests/server/parsers/*.py",
    "tests/structured/*.py",
)
PROCESSOR_FILES = (
    "benchmarks/gpu/sampling.py",
    "src/octavo/kernels/triton/edit.py",
    "src/octavo/sampling/*.py",
    "src/octavo/worker/*.py",
    "tests/kernels/triton/more_launches.py",
    "tests/sampling/*.py",
    "tests/worker/test_edit_record.py",
)
METADATA_FILES = (
    "benchmarks/gpu/*.py",
    "src/octavo/kernels/triton/threshold.py",
    "src/octavo/sampling/*.py",
    "src/octavo/worker/*.py",
    "tests/kernels/triton/*.py",
    "tests/sampling/*.py",
    "tests/worker/*.py",
)
MAX_LOGIT_FILES = (
    "benchmarks/gpu/sampling.py",
    "src/octavo/kernels/triton/draw.py",
    "src/octavo/kernels/triton/rate.py",
    "src/octavo/kernels/triton/threshold.py",
    "src/octavo/sampling/*.py",
    "src/octavo/worker/device_sampling.py",
    "tests/sampling/*.py",
)
IN_FILES = [  # (files, {old: new})
    (
        SCHEDULER_OUTPUT_FILES,
        {
            "order": "scheduler_output",
            "orders": "scheduler_outputs",
            "_order": "_scheduler_output",
            "order_of": "scheduler_output_of",
        },
    ),
    (
        MODEL_OUTPUT_FILES,
        {"answer": "model_output", "answers": "model_outputs", "answer_to": "model_output_for", "Answer": "PendingOutput"},
    ),
    (CONSTRAINT_FILES, {"form": "constraint", "forms": "constraints", "_forms": "_constraints", "FORMS": "CONSTRAINTS"}),
    (("tests/structured/*.py",), {"_FORMS": "_CONSTRAINTS"}),
    (
        PROCESSOR_FILES,
        {
            "edits": "processors",
            "_edits": "_processors",
            "edit": "process_logits",
            "edited": "processed",
            "_edited": "_processed",
            "_edit": "_process_logits",
            "Edits": "LogitsProcessorTensors",
        },
    ),
    (("src/octavo/sampling/rows.py",), {"_asked": "_processor_params"}),
    (("src/octavo/sampling/edits.py", "src/octavo/sampling/rows.py", "tests/sampling/*.py"), {"wanted": "are_needed"}),
    (("src/octavo/server/openai/*.py",), {"wishes": "response_options", "_wishes": "_response_options"}),
    (("src/octavo/kernels/triton/threshold.py",), {"wishes": "row_args"}),
    (METADATA_FILES, {"wishes": "metadata", "_wishes": "_metadata"}),
    (
        ("benchmarks/kernels/ops.py", "src/octavo/sampling/*.py", "src/octavo/worker/*.py"),
        {"draws": "backend", "_draws": "_backend"},
    ),
    (MAX_LOGIT_FILES, {"largest": "max_logit"}),
    (("src/octavo/layers/logits.py", "src/octavo/models/common.py"), {"largest": "argmax"}),
    (("src/octavo/kernels/native.py",), {"largest": "argmax"}),
    (("src/octavo/worker/*.py", "tests/worker/*.py", "benchmarks/gpu/*.py"), {"LARGEST": "ARGMAX"}),
    (("src/octavo/scheduler/*.py",), {"draft": "builder", "_draft": "_plan_step", "book": "build", "_book": "_commit"}),
    (("src/octavo/scheduler/*.py",), {"news": "update", "_refusal": "_rejection", "refusal": "rejection"}),
    (("src/octavo/scheduler/pace.py",), {"_most": "_max_tokens", "note": "record"}),
    (("src/octavo/scheduler/scheduler.py",), {"note": "record"}),
    (("src/octavo/scheduler/*.py",), {"_shares": "_running_scheduler", "share": "running_tokens", "_dealt": "_balanced"}),
    (("benchmarks/host/pipeline_bubble.py",), {"_dealt": "_balanced"}),
    (("src/octavo/scheduler/shares.py",), {"most": "max_single"}),
    (("src/octavo/scheduler/block_pool.py",), {"name": "block_hash", "_name": "_hash", "_named": "_hashed"}),
    (("src/octavo/scheduler/block_manager.py",), {"name": "block_hash", "bearers": "hashed"}),
    (("src/octavo/scheduler/draft.py",), {"bearers": "hashed"}),
    (("tests/scheduler/test_block_pool.py",), {"name": "hash_of", "named": "hashed"}),
    (("src/octavo/worker/prompt_logprobs.py", "tests/structured/test_manager.py"), {"news": "update"}),
    (("tests/scheduler/test_ends.py", "tests/scheduler/test_pace.py"), {"news": "outputs_of_steps"}),
    (("src/octavo/engine/async_llm_engine.py",), {"news": "updated"}),
    (("src/octavo/server/openai/run.py", "src/octavo/server/openai/chat_stream.py"), {"news": "deltas"}),
    (
        (
            "src/octavo/config/parallel.py",
            "src/octavo/executor/*.py",
            "tests/config/test_parallel.py",
        ),
        {"answers": "returns_output"},
    ),
    (
        ("src/octavo/layers/dealt_experts.py",),
        {"answers": "expert_outputs", "_answers": "_expert_outputs", "_dealt": "_expert_shares"},
    ),
    (("src/octavo/engine/core.py",), {"flight": "pending"}),
    (("src/octavo/executor/replies.py", "src/octavo/executor/distributed.py"), {"beside": "extra_fd"}),
    (("src/octavo/layers/embedding.py", "src/octavo/layers/table_in_file.py"), {"behind": "from_mapped"}),
    (("tests/layers/test_table_in_file.py",), {"behind": "from_mapped"}),
    (("src/octavo/models/common.py",), {"behind": "after", "dealt_experts": "expert_parallel"}),
    (("src/octavo/kernels/triton/attention.py",), {"behind": "num_left"}),
    (("tests/scheduler/test_ends.py",), {"behind": "later"}),
    (("tests/kernels/*.py", "tests/kernels/triton/*.py", "benchmarks/offline/*.py"), {"beside": "alongside"}),
    (("src/octavo/kernels/triton/quantized.py", "benchmarks/gpu/experts.py"), {"_map": "_linear"}),
    (("benchmarks/gpu/kernels.py",), {"maps": "linears"}),
    (("benchmarks/gpu/few_bits.py",), {"_maps": "_linears"}),
    (("tests/kernels/test_quantize.py", "tests/kernels/triton/*.py"), {"NESTED": "TWO_LEVEL"}),
    (("tests/kernels/*.py",), {"NESTED": "TWO_LEVEL"}),
    (("tests/models/test_expert_parallel.py", "tests/distributed/test_groups.py"), {"dealt": "sharded"}),
    (("src/octavo/kernels/reference_quantized.py",), {"_MOST": "_MAX"}),
]
# `map` and friends as built-in names stay; these files use `maps` for linear layers.
IN_FILES += [
    (
        (
            "benchmarks/kernels/ops.py",
            "src/octavo/kernels/triton/experts.py",
            "src/octavo/kernels/triton/low_bit_experts.py",
            "src/octavo/worker/memory.py",
            "src/octavo/worker/parameters.py",
            "tests/kernels/ops.py",
            "tests/kernels/test_integer_experts.py",
            "tests/worker/test_memory.py",
        ),
        {"maps": "linears"},
    )
]

# -- exact replacements in single files, before everything else: (files, regex, replacement) ----------------------------
PLACES = [
    ("src/octavo/kernels/native.py", r"\btoken_ids, largest\b", "token_ids, max_logit"),
    ("src/octavo/kernels/native.py", r"(token_ids\.data_ptr\(\), )largest\b", r"\1max_logit"),
    ("tests/scheduler/test_block_pool.py", r'"_name"', '"_hash"'),
    ("tests/scheduler/test_block_pool.py", r"pool\._name\b", "pool._hash"),
    ("benchmarks/host/pipeline_bubble.py", r'"_shares"', '"_running_scheduler"'),
    ("benchmarks/host/pipeline_bubble.py", r"Undealt, one\nbatch", "Else one\nbatch"),
    ("src/octavo/scheduler/scheduler.py", r"columns of progress in `running`, what they compute next in `shares`, waiting order in\n`request_queue`,",
     "columns of progress in `running`, what they compute next in `running_scheduler`, waiting\norder in `request_queue`,"),
    ("src/octavo/scheduler/scheduler.py", r"the step being put together in `draft`, its\nanswer in `progress`, ends of requests in `stop`, requests that wait for a grammar or run under one in `constrained`,\nthe two messages in `contracts`.",
     "the step being built in\n`step_builder`, its answer in `step_update`, ends of requests in `stop`, requests that wait for a grammar or run under\none in `constrained`, the two messages in `contracts`."),
    ("src/octavo/scheduler/scheduler.py", r"`shares`", "`running_scheduler`"),
    ("src/octavo/scheduler/scheduler.py", r"`draft`", "`step_builder`"),
    ("src/octavo/scheduler/scheduler.py", r"in `progress`", "in `step_update`"),
    ("src/octavo/scheduler/block_pool.py", r"is named already", "has a hash already"),
    ("tests/scheduler/test_block_pool.py", r'"named already"', '"has a hash already"'),
    ("src/octavo/scheduler/*.py", r"\bnamed block", "hashed block"),
    ("src/octavo/scheduler/block_pool.py", r"keeps its name while free", "keeps its hash while free"),
    ("src/octavo/scheduler/block_pool.py", r"then   named <-> ... <-> named", "then   hashed <-> ... <-> hashed"),
    ("src/octavo/scheduler/block_pool.py", r"the names under which free ones", "the hashes under which free ones"),
    ("src/octavo/scheduler/block_pool.py", r"the block of this name", "the block of this hash"),
    ("src/octavo/scheduler/block_pool.py", r"was found by name", "was found by its hash"),
    ("src/octavo/scheduler/block_pool.py", r"nameless ones", "others"),
    ("src/octavo/scheduler/block_pool.py", r"already bears the name:", "already has the hash:"),
    ("src/octavo/scheduler/block_pool.py", r"that names point both ways", "that hashes point both ways"),
    ("src/octavo/scheduler/block_manager.py", r"prefix reuse by block name", "prefix reuse by block hash"),
    ("src/octavo/scheduler/block_manager.py", r"Named ones stay findable", "Hashed ones stay findable"),
    ("src/octavo/scheduler/block_manager.py", r"Returns the name of the last, and those that now bear theirs: where an equal block was first, that one does",
     "Returns the hash of the last, and the blocks now found by theirs: where an equal block was first, that one is"),
    ("src/octavo/scheduler/draft.py", r"return those that now bear their names", "return those now found by their hashes"),
    ("src/octavo/scheduler/draft.py", r"Name the blocks that", "Hash the blocks that"),
    ("src/octavo/scheduler/draft.py", r"never enters a name", "never enters a hash"),
    ("src/octavo/scheduler/draft.py", r"Close the draft: write the order,", "Finish the step: write the scheduler output,"),
    ("src/octavo/scheduler/draft.py", r"get their names as they are filled", "get their hashes as they are filled"),
    ("src/octavo/scheduler/running.py", r"in full blocks whose names are known", "in full blocks whose hashes are known"),
    ("src/octavo/scheduler/running.py", r"# name of the last full block", "# hash of the last full block"),
    ("src/octavo/scheduler/scheduler.py", r"a name given in a later one may", "a hash set in a later one may"),
    ("src/octavo/scheduler/scheduler.py", r"others lose their name\.", "others lose their hash."),
    ("docs/*.md", r"`(?:StepDraft|StepBuilder)\.book`", "`StepBuilder.build`"),
    ("docs/*.md", r"`kernels/triton/edit.py` `edit`", "`kernels/triton/edit.py` `process_logits`"),
    ("docs/*.md", r"`sampling/draw.py` `Draws`", "`sampling/draw.py` `SamplerBackend`"),
    ("docs/*.md", r"`engine/core.py` `Flight`", "`engine/core.py` `PendingStep`"),
    # prose whose lines would become too long
    ("src/octavo/config/args.py", r"the weights of linear maps, made at load, as integers", "weights of linear layers, made at load, as integers"),
    ("src/octavo/kernels/cpu_float32.py", r"packed linear maps are invariant", "packed linears are invariant"),
    ("src/octavo/sampling/device_edits.py", r"Edits of logits on the device: penalties, bias, masks and bad words, as `edits.py` and `grammar.py` define them\.",
     "Logits processors on the device: penalties, bias, masks, bad words, as `edits.py` and `grammar.py` define\nthem."),
    ("src/octavo/sampling/device_edits.py", r"What rows ask for beside numbers of their own, which are in `Wishes`: lists over all rows of the step\.",
     "What rows ask for beyond numbers of their own (`Wishes`): lists over all rows of the step."),
    ("src/octavo/sampling/device_edits.py", r"Return the arrays of `Edits` for the worker's rows `row_ids` \[L\], and `mask_indices` \[L\] into its masks\.",
     "Return the arrays of `Edits` for the worker's rows `row_ids` [L], and `mask_indices` [L]."),
    ("src/octavo/sampling/rows.py", r"the rest own their edits\.", "the rest own logits processors."),
    ("src/octavo/sampling/rows.py", r"With `edits_on_device` nobody counts tokens here: `device_edits.py` does\. `device` is where sampling happens: the\n    logits' device",
     "With `edits_on_device` nobody counts tokens here: `device_edits.py` does.\n    `device` is where sampling happens: the logits' device"),
    ("src/octavo/sampling/sampler.py", r"of which `takes_largest` is true: their largest logits \[L\], and whose \[L\]", "where `takes_largest`: their largest logits [L], and whose [L]"),
    ("src/octavo/structured/check.py", r"`FormChecker` has it done in a process that may die\. What shows only when the form is\ncompiled",
     "`FormChecker` has it done in a process that may die. What shows only\nwhen it is compiled"),
    ("src/octavo/worker/memory.py", r"where linear maps become integers\. The embedding stays as it is beside the logits head's copy",
     "where linear layers become integers. The embedding stays as it is"),
    ("src/octavo/worker/rank_loop.py", r"A step is answered by one rank \(`RankPlace.answers`\); its failure, by any", "A step is answered by one rank (`RankPlace.answers`), its failure by any"),
    ("src/octavo/engine/core.py", r"flight\.answer\b", "flight.future"),
    ("src/octavo/engine/core.py", r"\banswer: Future\[", "future: Future["),
    ("src/octavo/engine/core.py", r"\banswer\.set_exception\(", "future.set_exception("),
    ("src/octavo/engine/core.py", r"\breturn answer\b", "return future"),
    ("src/octavo/executor/steps.py", r"def answer\(self, answer\b", "def complete(self, model_output"),
    ("src/octavo/executor/*.py", r"_steps\.answer\(", "_steps.complete("),
    ("src/octavo/worker/*.py", r"\bplace\.answers\b", "place.returns_output"),
    ("tests/worker/threaded_ranks.py", r"\bplace\.answers\b", "place.returns_output"),
    ("*", r"\bRankPlace\.answers\b", "RankPlace.returns_output"),
    ("*", r"\bLogitsHead\.largest\b", "LogitsHead.argmax"),
    ("src/octavo/worker/graph_key.py", r'"largest"', '"argmax"'),
    ("tests/worker/*.py", r'"largest"', '"argmax"'),
    ("tests/kernels/*.py", r'"nested" if', '"two-level" if'),
    ("tests/kernels/triton/*.py", r'"nested" if', '"two-level" if'),
    # C++: the op that finds each row's largest logit, and work that is done alongside a product
    ("*.h", r"\bLargest\b", "Argmax"),
    ("src/octavo/kernels/cpu/kernels.h", r"\bvoid largest\(", "void argmax("),
    ("*.h", r"\bmaps_\.largest\b", "maps_.argmax"),
    ("src/octavo/kernels/cpu/module.cpp", r'"largest", &Kernels::largest', '"argmax", &Kernels::argmax'),
    ("*.pyi", r"def largest\(", "def argmax("),
    ("*.h", r"\.largest = ", ".argmax = "),
    ("*.h", r"OCTAVO_LEVEL::largest\b", "OCTAVO_LEVEL::argmax"),
    ("*.h", r"\(\*largest\)\(", "(*argmax)("),
    ("*.h", r"\blargest\(", "argmax("),
    ("*.h", r"\bBeside\b", "Alongside"),
    ("*.h", r"\bbeside(?=\(|\)| = \{)", "alongside"),
    ("src/octavo/kernels/cpu/tape.h", r"\bmaps\b", "layer_ops"),
    ("tests/kernels/sanitized/*", r"\bMapOps& maps\b", "MapOps& layer_ops"),
    ("tests/kernels/sanitized/*", r"\bmaps_\(maps\)", "maps_(layer_ops)"),
    ("*.h", r"\bkMost(?=[A-Z])", "kMax"),
    ("*.cpp", r"\bkMost(?=[A-Z])", "kMax"),
    # what rests of a rename in comments and docstrings
    ("src/octavo/sampling/*.py", r"\blargest \[", "max_logit ["),
    ("*", r"`Edits`", "`LogitsProcessorTensors`"),
]

# -- one spelling ------------------------------------------------------------------------------------------------------
SPELLING = [
    (r"([Qq]uanti|[Nn]ormali|[Tt]okeni|[Pp]enali|[Rr]ecogni|[Oo]rgani|[Ss]ummari|[Vv]ectori|[Rr]enormali)s"
     r"(?=(?:e|ed|es|er|ers|ing|ation|ations)(?![a-z]))", r"\1z"),
    (r"(_?QUANTI|NORMALI|RENORMALI|PENALI)S(?=(?:E|ED|ES|ING|ATION)(?![A-Z]))", r"\1Z"),
    (r"([Nn])eighbour", r"\1eighbor"),
    (r"([Bb])ehaviour", r"\1ehavior"),
    (r"([Ff])avoured", r"\1avored"),
    (r"print_labelled", "print_labeled"),
]

# -- prose of one meaning ----------------------------------------------------------------------------------------------
PROSE = [
    (r"\b([Rr])ow-invarian(t|ce)", lambda m: ("B" if m[1] == "R" else "b") + "atch-invarian" + m[2]),
    (r"\brow invarian(t|ce)", r"batch invarian\1"),
    (r"\blinear maps\b", "linear layers"),
    (r"\blinear map\b", "linear layer"),
    (r"\bthe orderly end\b", "graceful shutdown"),
    (r"\borderly end\b", "graceful shutdown"),
    (r"\bnested (?=integers?\b|int4\b|weights?\b|ones\b)", "two-level "),
    (r"\barg-max\b", "argmax"),
]

SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".md", ".toml", ".txt", ""}
EXCLUDED = ("benchmarks/results/*", "src/octavo/demo/*", "tools/*", "LICENSE", ".gitignore", "tests/clients/requirements.txt", "*/requirements/*")
OLD_PATH = {new: old for old, new in MOVES.items()}


def main(root: Path) -> None:
    paths = [path for path in list_files(root) if is_text(path)]
    for path in paths:
        before = (root / path).read_text(encoding="utf-8")
        after = rename(OLD_PATH.get(path, path), before)
        if after != before:
            (root / path).write_text(after, encoding="utf-8")
    for old, new in MOVES.items():
        if (root / old).exists():
            assert not (root / new).exists(), f"{old} and {new} are both there"
            is_tracked = subprocess.run(["git", "ls-files", "--error-unmatch", old], cwd=root, capture_output=True)
            if is_tracked.returncode == 0:
                subprocess.run(["git", "mv", old, new], cwd=root, check=True)
            else:
                (root / old).rename(root / new)
    ruff = str(root / ".venv/bin/ruff") if (root / ".venv/bin/ruff").exists() else "ruff"
    subprocess.run([ruff, "check", "--fix", "--select", "I", "-q", "."], cwd=root, check=True)
    subprocess.run([ruff, "format", "-q", "."], cwd=root, check=True)


def list_files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    found = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\n")
    return sorted({path for path in found if path and (root / path).is_file() and not (root / path).is_symlink()})


def is_text(path: str) -> bool:
    return Path(path).suffix in SUFFIXES and not any(fnmatch(path, pattern) for pattern in EXCLUDED)


def rename(path: str, text: str) -> str:
    """Return the text of a file, known by its old path."""
    for pattern, regex, replacement in PLACES:
        if fnmatch(path, pattern):
            text = re.sub(regex, replacement, text)
    if path.endswith(".py"):
        text = rename_shared(path, text)
    text = rename_shared_in_docs(text) if path.endswith(".md") else text
    text = rename_paths(text)
    if path.endswith(".py"):
        names: dict[str, str] = {}
        for patterns, table in IN_FILES:
            if any(match(path, pattern) for pattern in patterns):
                names = {**table, **names}
        if names:
            text = rename_names(text, names)
    text = ANYWHERE_REGEX.sub(lambda found: ANYWHERE[found[0]], text)
    if path != "CHANGELOG.md":
        for regex, replacement in PROSE:
            text = re.sub(regex, replacement, text)
    for regex, replacement in SPELLING:
        text = re.sub(regex, replacement, text)
    return fold_long_prose(text) if path.endswith(".py") else text


WIDTH = 120


def fold_long_prose(text: str) -> str:
    """Pass words that no longer fit from a line of a docstring, or of a comment of its own, on to the next line."""
    is_prose = [False] * (text.count("\n") + 2)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return text
    for token in tokens:
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if is_docstring and not token.line[: token.start[1]].strip():
            is_prose[token.start[0] : token.end[0] + 1] = [True] * (token.end[0] + 1 - token.start[0])
        elif token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            is_prose[token.start[0]] = True
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if len(line) <= WIDTH or not is_prose[at + 1]:
            at += 1
            continue
        lead = re.match(r"\s*(?:# )?", line)[0]  # type: ignore[index]
        ends = line.endswith('"""') and not line.strip() == '"""'
        body = line.removesuffix('"""') if ends else line
        # ruff format brings the quotes of a docstring of one line back, so such a line gives words away
        is_whole = ends and body.lstrip().startswith('"""')
        fits = len(body) <= WIDTH and not is_whole
        cut = len(body) if fits else body.rfind(" ", len(lead) + 3, min(len(body), WIDTH + 1))
        if cut <= 0:
            at += 1
            continue
        kept, rest = body[:cut].rstrip(), body[cut:].strip()
        follows = lines[at + 1] if at + 1 < len(lines) and is_prose[at + 2] else ""
        joins = follows.startswith(lead) and follows[len(lead) : len(lead) + 1] not in ("", " ", '"', "-", "#") and not ends
        lines[at] = kept
        if rest and joins:
            lines[at + 1] = f"{lead}{rest} {follows[len(lead):]}"
        elif rest:
            lines.insert(at + 1, lead + rest)
            is_prose.insert(at + 2, True)
        if ends:
            last = at + 2 if rest else at + 1
            lines.insert(last, lead + '"""')
            is_prose.insert(last + 1, True)
        at += 1
    return "\n".join(lines)


ANYWHERE_REGEX = re.compile(r"\b(?:" + "|".join(sorted(ANYWHERE, key=len, reverse=True)) + r")\b")


def match(path: str, pattern: str) -> bool:
    """As fnmatch, but `*` stays in its folder."""
    return fnmatch(path, pattern) and path.count("/") == pattern.count("/")


def module_of(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").replace("/", ".")


def rename_shared(path: str, text: str) -> str:
    for home, old, new in SHARED_NAMES:
        modules = {module_of(home), module_of(MOVES.get(home, home))}
        if path == home:
            is_here = re.search(rf"^class {old}\b", text, re.MULTILINE) is not None
        else:
            is_here = any(
                isinstance(node, ast.ImportFrom) and node.module in modules and old in [a.name for a in node.names]
                for node in ast.walk(ast.parse(text))
            )
        if is_here:
            text = rename_names(text, {old: new}, in_strings=True)
    return text


def rename_shared_in_docs(text: str) -> str:
    """In docs a symbol follows its file: `worker/model_runner.py` `ModelRunner.execute_model`, `Another`."""
    for home, old, new in SHARED_NAMES:
        for place in {home, MOVES.get(home, home)}:
            short = re.escape(place.removeprefix("src/octavo/"))
            text = re.sub(rf"(`{short}`(?: `[^`]+`,)* `){old}\b", rf"\g<1>{new}", text)
    return text


def rename_paths(text: str) -> str:
    for old, new in MOVES.items():
        if old.endswith(".py"):
            text = re.sub(rf"\b{re.escape(module_of(old))}(?![\w/])", module_of(new), text)
            package, name = module_of(old).rsplit(".", 1)
            text = re.sub(rf"(from {re.escape(package)} import (?:\w+, )*){name}\b", rf"\g<1>{module_of(new).rsplit('.', 1)[1]}", text)
        short_old, short_new = old.removeprefix("src/octavo/"), new.removeprefix("src/octavo/")
        text = re.sub(rf"(?<![\w/]){re.escape(old)}(?!\w)", new, text)
        text = re.sub(rf"(?<![\w]){re.escape(short_old)}(?!\w)", short_new, text)
        if old.endswith(".h") or Path(old).name not in SEVERAL:
            text = re.sub(rf"(?<![\w/]){re.escape(Path(old).name)}(?!\w)", Path(new).name, text)
    return text


SEVERAL = {"progress.py", "draft.py", "shares.py", "draw.py", "edit.py", "test_thoughts.py"}  # names of other files too


def rename_names(text: str, names: dict[str, str], *, in_strings: bool = False) -> str:
    """Rename NAME tokens, also in f-strings, in first arguments of `parametrize` and in backticks of comments."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    word = re.compile(rf"(?<![\w]){'(?:' + one + ')'}(?!\w)")
    ticks = re.compile(rf"`(?:[\w.]+\.)?(?:{one})(?:[.(][^`]*)?`")

    def swap(found: re.Match[str]) -> str:
        return names[found[0]]

    lines = text.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    depth: int | None = None  # of brackets inside the first argument of `parametrize`
    last: list[str] = [""]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        value = token.string
        if token.type == tokenize.NAME and value in names:
            edits.append((token.start, token.end, names[value]))
        elif token.type == tokenize.COMMENT:
            changed = ticks.sub(lambda found: word.sub(swap, found[0]), value)
            edits.append((token.start, token.end, changed))
        elif token.type == tokenize.STRING:
            changed = value
            prefix = value[: min(value.find("'") % 9999, value.find('"') % 9999)].lower()
            if "f" in prefix:
                changed = in_braces(value, lambda code: sub_code(code, word, swap))
            elif value.lstrip("rRbBuU").startswith('"""'):
                changed = ticks.sub(lambda found: word.sub(swap, found[0]), value)
            elif depth is not None:  # names of parameters, as one string or as a tuple
                changed = word.sub(swap, value)
            elif in_strings and not re.search(r"\s", value):
                changed = word.sub(swap, value)  # a quoted annotation
            edits.append((token.start, token.end, changed))
        if value == "(" and last[-1] == "parametrize":
            depth = 0
        elif depth is not None and value in ("(", "[", ")", "]"):
            depth += 1 if value in "([" else -1
        elif depth == 0 and value == ",":
            depth = None
        if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            last = [value]
    for (row, column), (end_row, end_column), new in reversed(edits):
        head, tail = lines[row - 1][:column], lines[end_row - 1][end_column:]
        lines[row - 1 : end_row] = [head + new + tail]
    return "".join(lines)


def sub_code(code: str, word: "re.Pattern[str]", swap: object) -> str:
    """Rename in the code of an f-string's braces, but not inside of strings there."""
    pieces = re.split(r"('[^']*'|\"[^\"]*\")", code)
    return "".join(piece if piece[:1] in ("'", '"') else word.sub(swap, piece) for piece in pieces)  # type: ignore[call-overload]


def in_braces(value: str, change: object) -> str:
    out, depth, code, at = [], 0, "", 0
    while at < len(value):
        char = value[at]
        if depth == 0 and value[at : at + 2] in ("{{", "}}"):
            out.append(value[at : at + 2])
            at += 2
            continue
        if char == "{":
            depth += 1
            if depth == 1:
                out.append(char)
                at += 1
                continue
        if char == "}" and depth:
            depth -= 1
            if depth == 0:
                out.append(change(code) + char)  # type: ignore[operator]
                code = ""
                at += 1
                continue
        if depth:
            code += char
        else:
            out.append(char)
        at += 1
    return "".join(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
