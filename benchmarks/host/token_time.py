"""Where the time of one token goes at batch 1: kernels by phase (`kernels/cpu/phases.h`), and each part of the host.

Processor time of the thread that runs the steps, which is their time where nobody else computes: it spins while it
waits. Each part has what it does not hand on to another one.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

from octavo import LLM, SamplingParams
from octavo.engine.inproc_client import InprocClient
from octavo.executor.uniproc import UniProcExecutor
from octavo.kernels.native import NativeKernels

NUM_STEPS, NUM_SKIPPED = 64, 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + NUM_SKIPPED + 1, ignore_eos=True)
# What is printed, in this order. The logits are one product, with its rows.
PARTS = {
    "products": "products of layers",
    "logits": "logits and their argmax",
    "attention": "attention",
    "states": "recurrent states, convolutions",
    "keys": "keys and values: norms, rotary, writing",
    "rows": "residuals, norms, quantized or packed rows",
    "norms": "the last norm",
    "waiting": "waiting for the other thread",
    "other": "other ops, calls of the recorded step",
    "worker": "worker: rows, batch, tokens",
    "scheduler": "scheduler and core",
    "front": "detokenizer, outputs",
    "outside": "everything else",
}


class TokenTime:
    """Times the parts of an engine that runs in this process."""

    def __init__(self, llm: LLM) -> None:
        front = llm.engine.front
        core = cast("InprocClient", front.client)._core
        executor = cast("UniProcExecutor", core._executor)
        self._llm, self._kernels = llm, cast("NativeKernels", executor.worker.model.context.kernels)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stack, self._since_s = ["outside"], 0.0
        self._num_outputs = 0
        self.result: dict[str, float] = {}
        self._kernels.timed = self._timed_native  # type: ignore[method-assign]
        parts = (
            (front.outputs, "process", "front"),
            (core, "step", "scheduler"),
            (executor, "execute_model", "worker"),
        )
        for owner, name, part in parts:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        self._after_step = front.outputs.process
        front.outputs.process = self._count  # type: ignore[method-assign]

    def run(self, prompt: Sequence[int]) -> dict[str, float]:
        """Return microseconds a token, by part, of steps behind this prompt."""
        self._num_outputs = 0
        self._llm.generate([{"prompt_token_ids": list(prompt)}], PARAMS, use_tqdm=False)
        return self.result

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        result = self._after_step(*args, **kwargs)
        self._num_outputs += 1
        if self._num_outputs == NUM_SKIPPED:
            self._turn_to("outside")
            self._seconds.clear()
            self._kernels.native.start_phases()
        elif self._num_outputs == NUM_SKIPPED + NUM_STEPS:
            self._turn_to("outside")
            self.result = {part: self._seconds[part] / NUM_STEPS * 1e6 for part in PARTS}
        return result

    def _turn_to(self, part: str) -> None:
        """Account for the time since the last turn; `part` runs from now on."""
        now_s = time.thread_time()
        self._seconds[self._stack[-1]] += now_s - self._since_s
        self._since_s, self._stack[-1] = now_s, part

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._turn_to(self._stack[-1])
            self._stack.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn_to(part)
                self._stack.pop()

        return call

    def _timed_native(self, op: Callable[..., None], *args: Any) -> None:
        native = self._kernels.native
        self._turn_to(self._stack[-1])
        before = native.phase_seconds()
        op(*args)
        is_layers = op.__name__ == "replay"
        for phase, seconds in native.phase_seconds().items():
            if phase != "outside":
                self._seconds[phase if is_layers else "logits"] += seconds - before[phase]
        self._since_s = time.thread_time()


def table(measured: dict[str, dict[str, float]]) -> str:
    """Return a table: a row for each part, a column for each cell with its share."""
    totals = {cell: sum(parts.values()) for cell, parts in measured.items()}
    lines = ["| | " + " | ".join(measured) + " |", "| --- |" + " --- |" * len(measured)]
    for part, meaning in PARTS.items():
        shares = [f"{parts[part]:.0f} us, {parts[part] / totals[cell]:.1%}" for cell, parts in measured.items()]
        lines.append(f"| {meaning} | " + " | ".join(shares) + " |")
    rest = [1 - (parts["products"] + parts["logits"]) / totals[cell] for cell, parts in measured.items()]
    lines.append("| **not products** | " + " | ".join(f"**{share:.1%}**" for share in rest) + " |")
    lines.append("| ms a token | " + " | ".join(f"{total / 1e3:.2f}" for total in totals.values()) + " |")
    return "\n".join(lines)
