"""What share of a step is native calls, and how long the rest is: scheduling, laying out, sampling, detokenizing.

    python -m benchmarks.host.compute_share [--precision int8] [--model FOLDER] [--batch 1 8 32 128] [--repeats 3]

Random weights of Qwen3-0.6B's geometry, or another model; prompts of 16 tokens and 64 out, greedy. The engine's own
clock (`scheduler/busy_time.py`) measures from output to output, so nothing between two steps is left out. `LLM` runs
the core in its caller's thread; `AsyncLLM` in a process of its own, with a stream for each request. Medians of the
repeats. The aim is 97 % at batch 32.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.geometry import QWEN3_0_6B, write_checkpoint
from octavo import LLM, AsyncLLM, SamplingParams
from octavo.inputs import Prompt
from octavo.metrics.collect import EngineMetrics

NUM_IN, NUM_OUT = 16, 64
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_OUT, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {"bf16": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}


def prompts(batch: int) -> list[Prompt]:
    return [{"prompt_token_ids": [(at * 37 + index * 11) % 5000 + 5 for at in range(NUM_IN)]} for index in range(batch)]


class InProcess:
    """Batches of an `LLM`."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._llm = LLM(model, **options)
        self.metrics = self._llm.engine.front.outputs.metrics

    def run(self, batch: int) -> None:
        self._llm.generate(prompts(batch), PARAMS, use_tqdm=False)

    def close(self) -> None:
        self._llm.exit()


class OwnProcess:
    """Streams of an `AsyncLLM`."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._llm = AsyncLLM(model, **options)
        self.metrics = self._loop.run_until_complete(self._llm.engine()).front.outputs.metrics

    def run(self, batch: int) -> None:
        self._loop.run_until_complete(self._all(batch))

    async def _all(self, batch: int) -> None:
        await asyncio.gather(*(self._one(prompt) for prompt in prompts(batch)))

    async def _one(self, prompt: Prompt) -> None:
        async for _ in self._llm.stream(prompt, PARAMS):
            pass

    def close(self) -> None:
        self._loop.run_until_complete(self._llm.exit())
        self._loop.close()


ENGINES: dict[str, type[InProcess | OwnProcess]] = {"LLM": InProcess, "AsyncLLM": OwnProcess}


def totals(metrics: EngineMetrics) -> tuple[int, float, float]:
    """Return steps, and the seconds of all of them and of their native calls."""
    stats = metrics.stats
    return (metrics.step_tokens.count, 0.0, 0.0) if stats is None else (
        metrics.step_tokens.count, stats.step_s_total, stats.compute_s_total
    )  # fmt: skip


def measure(engine: InProcess | OwnProcess, batch: int) -> dict[str, float]:
    before = totals(engine.metrics)
    engine.run(batch)
    num_steps, step_s, compute_s = (end - start for start, end in zip(before, totals(engine.metrics), strict=True))
    return {"step_ms": 1e3 * step_s / num_steps, "host_us": 1e6 * (step_s - compute_s) / num_steps,
            "share": compute_s / step_s}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=list(OPTIONS), default="int8")
    parser.add_argument("--model", help="a checkpoint or GGUF file, in its own precision")
    parser.add_argument("--engine", choices=list(ENGINES), action="append", help="repeatable; default: both")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"max_model_len": 256, "enable_prefix_caching": False}
        if args.model is None:
            options |= {**OPTIONS[args.precision], "load_format": "dummy"}
            write_checkpoint(Path(folder), QWEN3_0_6B)
        for name in args.engine or ENGINES:
            engine = ENGINES[name](args.model or folder, options)
            for batch in args.batch:
                engine.run(batch)  # allocates memory
                runs = [measure(engine, batch) for _ in range(args.repeats)]
                row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                rows.append({"model": args.model or args.precision, "engine": name, "batch": batch, **row})
                print(f"{rows[-1]['model']:8} {name:9} batch {batch:3}  {row['step_ms']:7.1f} ms a step, "
                      f"{row['host_us']:6.0f} us of it the host's: {row['share']:.1%} native", flush=True)  # fmt: skip
                if args.out is not None:
                    args.out.write_text(json.dumps(rows, indent=1) + "\n")
            engine.close()


if __name__ == "__main__":
    main()
