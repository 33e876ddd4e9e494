"""vLLM's build for CPUs, its engine in this process, driven step by step.

python -m benchmarks.peers.vllm_peer MODEL --precision w8a8 --cells decode:8:128 prefill:1024
"""

import os
import time
from pathlib import Path

from benchmarks.geometry import QWEN3_0_6B, kv_bytes_per_token
from benchmarks.peers import vllm_export
from benchmarks.peers.cells import Arrivals, Capacity
from benchmarks.peers.runner import run

BLOCK = 128


class Vllm:
    """A compiled model with room for the largest cell."""

    def __init__(self, model: Path, precision: str, capacity: Capacity, threads: int) -> None:
        blocks = capacity.total_tokens // BLOCK + 2 * capacity.num_requests
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core here: steps can be seen, memory is one process's
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(vllm_export.make(model, precision)),
                dtype="bfloat16",
                max_model_len=-(-capacity.num_tokens // BLOCK) * BLOCK,
                max_num_seqs=capacity.num_requests,
                max_num_batched_tokens=2048,
                block_size=BLOCK,
                kv_cache_memory_bytes=blocks * BLOCK * kv_bytes_per_token(QWEN3_0_6B),
                enable_prefix_caching=False,
            )
        )
        self._num_requests = 0

    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        """See `cells.Engine`."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_out, min_tokens=num_out, ignore_eos=True)
        arrivals: dict[str, list[float]] = {}
        begun_s = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            name = str(self._num_requests)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            arrivals[name] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter() - begun_s
            for output in outputs:
                times = arrivals[output.request_id]
                times.extend([now_s] * (len(output.outputs[0].token_ids) - len(times)))
        return list(arrivals.values())


if __name__ == "__main__":
    run(__doc__, vllm_export.PRECISIONS, Vllm)
