"""OpenVINO GenAI: its pipeline with continuous batching and paged attention, driven step by step.

    python -m benchmarks.peers.openvino_peer MODEL --precision int8+kv8 --cells decode:8:128 prefill:1024

`+kv8` is keys and values in 8 bits, which OpenVINO does by itself on a CPU; without it they are kept in bf16.
"""

import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers import openvino_export
from benchmarks.peers.cells import Arrivals, Capacity
from benchmarks.peers.runner import run

BLOCK = 32
PRECISIONS = [weights + kv for weights in openvino_export.WEIGHTS for kv in ("", "+kv8")]


class OpenVino:
    """A compiled model with room for the largest cell."""

    def __init__(self, model: Path, precision: str, capacity: Capacity, threads: int) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.num_kv_blocks = capacity.total_tokens // BLOCK + 2 * capacity.num_requests
        scheduling.max_num_seqs = capacity.num_requests
        scheduling.max_num_batched_tokens = 2048
        scheduling.enable_prefix_caching = False
        keys_and_values = openvino.Type.u8 if precision.endswith("+kv8") else openvino.Type.bf16
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            openvino_export.make(model, openvino_export.weights_of(precision)),
            scheduling,
            "CPU",
            {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": keys_and_values},
        )

    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        """See `cells.Engine`."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=num_out, min_new_tokens=num_out, ignore_eos=True, do_sample=False
        )
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        begun_s = time.perf_counter()
        handles = [self._pipeline.add_request(number, ids, config) for number, ids in enumerate(inputs)]
        arrivals: Arrivals = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter() - begun_s
            for handle, times in zip(handles, arrivals, strict=True):
                while handle.can_read():
                    times.extend(now_s for output in handle.read().values() for _ in output.generated_ids)
        return arrivals


if __name__ == "__main__":
    run(__doc__, PRECISIONS, OpenVino)
