"""Octavo itself, measured like every peer.

    python -m benchmarks.peers.octavo_peer MODEL --precision int8 --cells decode:8:128 prefill:1024

`int8+kv8` is int8 weights with int8 keys and values; `q8_0` is the GGUF file of that form, computed in its blocks.
"""

import time
from pathlib import Path
from typing import Any

from benchmarks.peers.cells import Arrivals, Capacity
from benchmarks.peers.registry import GGUF_FORMS
from benchmarks.peers.runner import run
from octavo import SamplingParams
from octavo.engine.llm_engine import LLMEngine

BLOCK = 32
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    **{f"{name}+kv8": {"kv_cache_dtype": "int8", "quantization": name} for name in ("int8", "int4")},
    "bf16+kv8": {"kv_cache_dtype": "int8"},
    **{form: {"quantization": "gguf"} for form in GGUF_FORMS},
}


class Octavo:
    """An engine in this process, driven step by step."""

    def __init__(self, model: Path, precision: str, capacity: Capacity, threads: int) -> None:
        blocks = -(-capacity.num_tokens // BLOCK) + 1
        file = model / f"{precision}.gguf" if precision in GGUF_FORMS else model
        self._engine = LLMEngine(
            str(file),
            tokenizer=str(model),
            max_model_len=blocks * BLOCK,
            max_num_seqs=capacity.num_requests,
            num_kv_blocks=max(blocks, capacity.total_tokens // BLOCK + capacity.num_requests),
            block_size=BLOCK,
            enable_prefix_caching=False,
            threads=threads,
            **OPTIONS[precision],
        )

    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        """See `cells.Engine`."""
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        begun_s = time.perf_counter()
        arrivals: dict[str, list[float]] = {
            self._engine.add_request({"prompt_token_ids": prompt}, params): [] for prompt in prompts
        }
        while self._engine.has_unfinished_requests():
            outputs, _ = self._engine.step()
            now_s = time.perf_counter() - begun_s
            for output in outputs:
                times = arrivals[output.request_id]
                times.extend([now_s] * (len(output.outputs[0].token_ids) - len(times)))
        return list(arrivals.values())


if __name__ == "__main__":
    run(__doc__, list(OPTIONS), Octavo)
