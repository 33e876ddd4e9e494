"""Which files two processes take first: the longest, so that neither waits for the other in the end.

xdist would begin with the files of most tests, and end with those of few long ones. Only the files that take long have
to be known; the order of the others does not show in the time. Measured with `--durations=0` (docs/log.md, "Tests").
"""

LONG = (
    "tests/server/test_operations.py",
    "tests/end_to_end/test_structured.py",
    "tests/engine/test_process_client.py",
    "tests/worker/test_overlapped_runner.py",
    "tests/end_to_end/test_pipeline.py",
    "tests/end_to_end/test_drafts.py",
    "tests/end_to_end/test_tensor_parallel.py",
    "tests/attention/test_invariance.py",
    "tests/end_to_end/test_pipeline_processes.py",
    "tests/end_to_end/test_same_bytes.py",
    "tests/executor/test_multiproc.py",
    "tests/end_to_end/test_greedy.py",
    "tests/server/test_data_parallel.py",
    "tests/kernels/triton/test_ops.py",
    "tests/end_to_end/test_smollm2.py",
    "tests/attention/test_features.py",
    "tests/engine/test_data_parallel.py",
    "tests/models/test_tensor_parallel.py",
    "tests/scheduler/test_random_schedules.py",
    "tests/end_to_end/test_expert_parallel.py",
    "tests/kernels/triton/test_low_bit_experts.py",
    "tests/end_to_end/test_recurrent.py",
    "tests/end_to_end/test_long_contexts.py",
    "tests/hostile/test_wrong_types.py",
    "tests/cli/test_generate.py",
    "tests/server/test_start.py",
    "tests/end_to_end/test_quantization.py",
    "tests/hostile/test_clients.py",
    "tests/end_to_end/test_triton.py",
)
_PLACES = {file: place for place, file in enumerate(LONG)}


def place(nodeid: str) -> int:
    """Return where the file of a test stands; sort by it, and tests of a file stay together."""
    return _PLACES.get(nodeid.partition("::")[0], len(LONG))
