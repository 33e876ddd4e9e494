"""What share of a step is native calls, and how long the rest is: scheduling, laying out, sampling, detokenizing.

    python -m benchmarks.host.compute_share [--precision int8] [--model FOLDER] [--batch 1 8 32 128] [--repeats 3]
    python -m benchmarks.host.compute_share --token 128 2048 [--precision int8 int4 bf16] [--model FOLDER]

The second form prints what one token at batch 1 is made of, behind contexts of these lengths: `token_time.py`.

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
from benchmarks.host.token_time import NUM_SKIPPED, NUM_STEPS, TokenTime, table
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


def measure_tokens(
    model: str, options: dict[str, Any], contexts: list[int], repeats: int
) -> dict[int, dict[str, float]]:
    """Return microseconds by part of a token behind each context: of the repeat with the median time."""
    llm = LLM(model, **options)
    clock, result = TokenTime(llm), {}
    for context in contexts:
        prompt = [(at * 37 + context) % 5000 + 5 for at in range(context)]
        runs = sorted((clock.run(prompt) for _ in range(repeats)), key=lambda parts: sum(parts.values()))
        result[context] = runs[len(runs) // 2]
    llm.exit()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=list(OPTIONS), nargs="+", default=["int8"])
    parser.add_argument("--model", nargs="+", help="checkpoints or GGUF files, in their own precision")
    parser.add_argument("--token", type=int, nargs="+", metavar="CONTEXT", help="the parts of a token at batch 1")
    parser.add_argument("--engine", choices=list(ENGINES), action="append", help="repeatable; default: both")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), QWEN3_0_6B)
        models: dict[str, tuple[str, dict[str, Any]]] = {
            precision: (folder, {**OPTIONS[precision], "load_format": "dummy"}) for precision in args.precision
        }
        if args.model is not None:
            models = {model: (model, {}) for model in args.model}
        if args.token is not None:
            print_tokens(models, args.token, args.repeats, args.out)
        else:
            print_steps(models, args.engine or list(ENGINES), args.batch, args.repeats, args.out)


def print_tokens(
    models: dict[str, tuple[str, dict[str, Any]]], contexts: list[int], repeats: int, out: Path | None
) -> None:
    options = {"max_model_len": max(contexts) + NUM_STEPS + NUM_SKIPPED + 2, "enable_prefix_caching": False}
    measured = {}
    for name, (model, of_model) in models.items():
        for context, parts in measure_tokens(model, options | of_model, contexts, repeats).items():
            measured[f"{Path(name).name}, {context}"] = parts
    print(table(measured))
    if out is not None:
        out.write_text(json.dumps(measured, indent=1) + "\n")


def print_steps(
    models: dict[str, tuple[str, dict[str, Any]]],
    engines: list[str],
    batches: list[int],
    repeats: int,
    out: Path | None,
) -> None:
    rows = []
    for model_name, (model, of_model) in models.items():
        options: dict[str, Any] = {"max_model_len": 256, "enable_prefix_caching": False, **of_model}
        for name in engines:
            engine = ENGINES[name](model, options)
            for batch in batches:
                engine.run(batch)  # allocates memory
                runs = [measure(engine, batch) for _ in range(repeats)]
                row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                rows.append({"model": model_name, "engine": name, "batch": batch, **row})
                print(f"{model_name:8} {name:9} batch {batch:3}  {row['step_ms']:7.1f} ms a step, "
                      f"{row['host_us']:6.0f} us of it the host's: {row['share']:.1%} native", flush=True)  # fmt: skip
                if out is not None:
                    out.write_text(json.dumps(rows, indent=1) + "\n")
            engine.close()


if __name__ == "__main__":
    main()
