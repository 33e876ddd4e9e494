"""Which tests a process takes together, and which first: the longest, so that none waits for the others in the end.

A process takes whole files, and folders whose files share a server or checkpoints: each process would make them once
more. xdist would begin with the files of most tests, and end with those of few long ones. Only those that take long
have to be known; the order of the others does not show in the time. Measured in CPU seconds (docs/log.md, "Tests");
what mostly waits for processes stands between what computes.
"""

ONE_PROCESS = ("tests/hostile", "tests/models", "tests/server")  # but for files below, which share nothing

LONG = (
    "tests/server",
    "tests/models",
    "tests/hostile",
    "tests/end_to_end/test_eagle3.py",
    "tests/engine/test_outliving.py",
    "tests/worker/test_overlapped_runner.py",
    "tests/executor/test_multiproc.py",
    "tests/attention/test_invariance.py",
    "tests/kernels/triton/test_low_bit_experts.py",
    "tests/end_to_end/test_same_bytes.py",
    "tests/attention/test_features.py",
    "tests/server/test_operations.py",
    "tests/end_to_end/test_draft_model.py",
    "tests/end_to_end/test_structured.py",
    "tests/kernels/triton/test_ops.py",
    "tests/test_readme.py",
    "tests/cli/test_generate.py",
    "tests/end_to_end/test_triton.py",
    "tests/benchmarks/test_gpu.py",
    "tests/config/test_hub.py",
    "tests/end_to_end/test_hybrids.py",
    "tests/end_to_end/test_pipeline.py",
    "tests/end_to_end/test_greedy.py",
    "tests/end_to_end/test_pipeline_processes.py",
    "tests/scheduler/test_random_schedules.py",
    "tests/calibration/test_quantized_checkpoint.py",
    "tests/multimodal/test_any_company.py",
    "tests/kernels/test_against_reference.py",
    "tests/loader/test_quantized_checkpoints.py",
    "tests/kernels/test_batch_invariance.py",
    "tests/structured/test_llguidance_backend.py",
    "tests/end_to_end/test_drafts.py",
    "tests/engine/test_process_client.py",
    "tests/kernels/triton/test_attention.py",
    "tests/end_to_end/test_quantization.py",
    "tests/structured/test_checker.py",
    "tests/kernels/triton/test_low_bit.py",
    "tests/end_to_end/test_expert_parallel.py",
    "tests/attention/test_backends.py",
    "tests/end_to_end/test_adapters.py",
    "tests/test_working_folder.py",
    "tests/end_to_end/test_long_contexts.py",
    "tests/scheduler/test_pace.py",
    "tests/kernels/test_native_attention.py",
    "tests/sampling/test_draw.py",
    "tests/demo/test_score.py",
    "tests/end_to_end/test_latent.py",
    "tests/server/test_images.py",
    "tests/worker/test_graph.py",
    "tests/sampling/test_native_draw.py",
    "tests/kernels/test_integers.py",
    "tests/kernels/triton/test_matmul.py",
    "tests/sampling/test_sampler.py",
    "tests/server/parsers/test_any_cut.py",
    "tests/end_to_end/test_reasoning.py",
    "tests/kernels/test_integer_shares.py",
    "tests/loader/test_damaged.py",
    "tests/server/test_files.py",
    "tests/kernels/triton/test_threshold.py",
    "tests/engine/test_llm_engine.py",
    "tests/engine/test_async_llm_engine.py",
    "tests/engine/test_data_parallel.py",
    "tests/end_to_end/test_storm.py",
    "tests/server/test_batches_killed.py",
    "tests/multimodal/test_exactness.py",
    "tests/server/test_lora.py",
    "tests/server/test_batches.py",
    "tests/worker/test_extra_inputs.py",
    "tests/server/test_data_parallel.py",
)
_PLACES = {unit: place for place, unit in enumerate(LONG)}


def unit(nodeid: str) -> str:
    """Return what a process takes as a whole when it takes this test: a file or a folder."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in ONE_PROCESS and file not in _PLACES else file


def place(nodeid: str) -> int:
    """Return where the unit of a test stands; sort by it, and tests of a unit stay together."""
    return _PLACES.get(unit(nodeid), len(LONG))
