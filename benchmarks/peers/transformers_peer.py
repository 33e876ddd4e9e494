"""transformers' `generate` on PyTorch, from Octavo's own test environment.

python -m benchmarks.peers.transformers_peer MODEL --cells decode:8:128 prefill:1024
"""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.peers.cells import Arrivals, Capacity
from benchmarks.peers.runner import run


class Clock(StoppingCriteria):
    """Never stops anything; notes when each step was done."""

    def __init__(self) -> None:
        self.begun_s = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.times.append(time.perf_counter() - self.begun_s)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """A model in bfloat16; its keys and values grow as they come."""

    def __init__(self, model: Path, precision: str, capacity: Capacity, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        """See `cells.Engine`."""
        ids = torch.tensor(prompts)
        clock = Clock()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_out,
            min_new_tokens=num_out,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return [clock.times for _ in prompts]


if __name__ == "__main__":
    run(__doc__, ["bf16"], Transformers)
