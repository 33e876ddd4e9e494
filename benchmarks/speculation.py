"""Prompt lookup beside plain decoding on a real model, and what verifying costs, in one run.

    python -m benchmarks.speculation [--model smollm2] [--dtype bfloat16] [--repeats 3] [--cost-geometry] [--out FILE]

Tasks are chats that ask to repeat their prompt, or do not. Engines take turns, task by task; tokens per second are
those after the first token, medians of the repeats. Every answer is compared with that of plain decoding: it must be
the same. What a model makes of a task differs from machine to machine, and a small one asked for a copy may write
something else. So the share of an answer's tokens that are in runs of eight from its prompt is shown, too.

`--cost-geometry` measures, with random weights of Qwen3-0.6B's geometry in int8, how long a step takes that verifies k
right drafts, and the tokens per second that this gives: the speed-up at full acceptance. The theory beside it is k + 1
tokens in the time of one, since the weights are read once.

`--draft-model` measures what drafts of a draft model cost at the same geometry in int8 (`agreeing_models.py`), as the
5th percentile of steps, and the speed-up that follows for known acceptance. The theory beside it reads the weights of
both models at the same speed, verifies any number of drafts in the time of one token, and knows the best number.

`--eagle` measures the same for an EAGLE-3 head of that geometry with random weights, and what steps without drafts take
beside those of an engine without a head; `--mtp` for an MTP head, at Qwen3.5-0.8B's geometry.
"""

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.agreeing_models import DRAFT, write_pair
from benchmarks.geometry import QWEN3_0_6B, QWEN3_5_0_8B, parameter_counts, write_checkpoint
from octavo import LLM, SamplingParams
from octavo.contracts.engine import SpecDecodeStats
from octavo.contracts.schedule import Int32Array
from octavo.engine import inproc_client
from octavo.engine.core import EngineCore
from octavo.inputs import Prompt
from octavo.outputs import RequestOutput
from octavo.speculative.drafters import RankDrafter

SOURCE = (Path(__file__).parent / "texts/budget.txt").read_text(encoding="utf-8")  # a module, as it once was
ARTICLE = (
    "The city council met on Tuesday to discuss the new bridge over the river. The bridge, which will cost forty "
    "million dollars, is planned to open in the spring of next year. Mayor Helen Ortiz said that the bridge will cut "
    "the time of the daily commute by twenty minutes. Several residents complained about the noise of the "
    "construction. The council agreed to limit the work to the hours between eight in the morning and six in the "
    "evening."
)
TASKS = {
    "copy text": f"Repeat the following text word for word:\n{ARTICLE}",
    "copy code": f"Repeat this file exactly:\n```python\n{SOURCE}```",
    "edit code": f"Rename the variable `granted` to `given` and print the whole file:\n```python\n{SOURCE}```",
    "summarize": f"Summarize what this file does, quoting its docstrings:\n```python\n{SOURCE}```",
    "JSON": "List ten European capitals as a JSON array of objects with the keys city, country and population.",
    "chat": "Tell me a story about a fox who learns to sail.",
}
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram"},
    "ngram, always": {"method": "ngram", "adaptive": False},
}
MAX_TOKENS = 256
RUN = 8  # tokens in a row that count as copied
DRAFT_COUNTS = (0, 1, 2, 3, 5, 7, 11, 15)
BATCHES = (1, 8)
NUM_IN, NUM_OUT = 128, 49
ACCEPTANCES = (1.0, 0.9, 0.8, 0.6, 0.3)
MODEL_DRAFT_COUNTS = (0, 1, 2, 4, 8)
MAX_DRAFTS = 8
DRAFT_NUM_OUT = 40
EAGLE: dict[str, Any] = {
    **QWEN3_0_6B,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
}


def tasks(model: str, dtype: str, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by task and way, tokens per second and the drafts of an answer."""
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 2048, "enable_prefix_caching": False}
    llms = {way: LLM(model, speculative_config=config, **options) for way, config in WAYS.items()}
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for task, text in TASKS.items():
        speeds: dict[str, list[float]] = {way: [] for way in WAYS}
        outputs: dict[str, RequestOutput] = {}
        for _ in range(1 + repeats):  # the first is not counted: it allocates memory and measures steps
            for way, llm in llms.items():
                (outputs[way],) = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)
                speeds[way].append(decode_speed(outputs[way]))
                assert outputs[way].outputs[0].token_ids == outputs["plain"].outputs[0].token_ids, (task, way)
        table[task] = {
            way: {
                "tokens_per_s": statistics.median(speeds[way][1:]),
                "num_tokens": len(output.outputs[0].token_ids),
                "num_drafts": output.metrics.num_drafts,
                "num_accepted": output.metrics.num_accepted_drafts,
                "share_copied": share_copied(output.prompt_token_ids, output.outputs[0].token_ids),
            }
            for way, output in outputs.items()
        }
    for llm in llms.values():
        llm.exit()
    return table


def share_copied(prompt: list[int], answer: list[int]) -> float:
    """Return the share of an answer's tokens that are in runs of `RUN` which occur in its prompt."""
    runs = {tuple(prompt[at : at + RUN]) for at in range(len(prompt) - RUN + 1)}
    copied = {
        place
        for at in range(len(answer) - RUN + 1)
        if tuple(answer[at : at + RUN]) in runs
        for place in range(at, at + RUN)
    }
    return len(copied) / len(answer)


def decode_speed(output: RequestOutput) -> float:
    times = output.metrics
    assert times.finished_time_s is not None and times.first_token_time_s is not None  # noqa: PT018 - both or none
    return (len(output.outputs[0].token_ids) - 1) / (times.finished_time_s - times.first_token_time_s)


class RightDrafter:
    """A drafter that knows every continuation, and proposes `count` tokens of it."""

    def __init__(self) -> None:
        self.max_num_drafts = max(DRAFT_COUNTS)
        self.count = 0
        self.sequences: dict[bytes, list[int]] = {}  # by prompt, as bytes

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[Sequence[int]]:
        return [self._continuation(context) for context in contexts]

    def _continuation(self, context: Int32Array) -> Sequence[int]:
        known = self.sequences.get(context[:NUM_IN].tobytes(), [])
        return known[len(context) : len(context) + self.count]

    def forget(self, request_id: str) -> None:
        """Nothing is stored by request."""


def costs(folder: Path, repeats: int) -> list[dict[str, float]]:
    """Return the time of steps that verify k right drafts of each request, and tokens per second."""
    drafter = RightDrafter()
    setattr(inproc_client, "EngineCore", partial(EngineCore, drafter=drafter))  # noqa: B010 - not an export
    llm = LLM(str(folder), load_format="dummy", quantization="int8", max_model_len=1024, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUT, ignore_eos=True)
    rows = []
    for batch in BATCHES:
        prompts: list[Prompt] = [
            {"prompt_token_ids": [(at * 37 + index * 11) % 5000 + 5 for at in range(NUM_IN)]} for index in range(batch)
        ]
        drafter.count = 0
        outputs = llm.generate(prompts, params, use_tqdm=False)
        drafter.sequences = {
            np.array(each.prompt_token_ids, dtype=np.int32).tobytes(): each.prompt_token_ids + each.outputs[0].token_ids
            for each in outputs
        }
        for count in DRAFT_COUNTS:
            drafter.count = count
            seconds = statistics.median(
                decode_seconds(llm.generate(prompts, params, use_tqdm=False)) for _ in range(repeats)
            )
            num_steps = -(-(NUM_OUT - 1) // (count + 1))
            rows.append(
                {
                    "batch": batch,
                    "drafts": count,
                    "step_ms": 1e3 * seconds / num_steps,
                    "tokens_per_s": batch * (NUM_OUT - 1) / seconds,
                }
            )
    return rows


class CountedDrafter(RankDrafter):
    """Has ranks draw `count` drafts."""

    count = 0

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[Sequence[int]]:
        return [places[: self.count] for places in super().propose(request_ids, contexts)]


def draft_costs(folder: Path, batches: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return what verifying and drawing cost, in milliseconds, and the speed-up that follows for each acceptance."""
    model, draft = write_pair(folder, ACCEPTANCES)
    return costs_of_drafts(model, {"model": str(draft)}, batches, repeats)


def eagle_costs(folder: Path, batches: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Do so for an EAGLE-3 head; its drafts are wrong."""
    model, head = write_checkpoint(folder / "model", QWEN3_0_6B), folder / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(EAGLE))
    return costs_of_drafts(model, {"method": "eagle3", "model": str(head)}, batches, repeats, load_format="dummy")


def mtp_costs(folder: Path, batches: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Do so for an MTP head."""
    model = write_checkpoint(folder / "model", QWEN3_5_0_8B)
    return costs_of_drafts(model, {"method": "mtp"}, batches, repeats, load_format="dummy")


def costs_of_drafts(
    model: Path, drafting: dict[str, Any], batches: Sequence[int], repeats: int, **more_options: Any
) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"quantization": "int8", "max_model_len": 512, "enable_prefix_caching": False}
    options |= more_options
    without = LLM(str(model), **options)
    drafter = CountedDrafter(max(MODEL_DRAFT_COUNTS), NUM_IN + DRAFT_NUM_OUT)
    setattr(inproc_client, "EngineCore", partial(EngineCore, drafter=drafter))  # noqa: B010 - not an export
    most = {"num_speculative_tokens": max(MODEL_DRAFT_COUNTS)}  # of which heads make fewer by default
    config = {**drafting, **most, "quantization": "int8", "adaptive": False}
    llm = LLM(str(model), speculative_config=config, **options)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        steps: dict[int, list[Step]] = {count: [] for count in MODEL_DRAFT_COUNTS}
        prompts, bare = [prompt_of_class(0, index) for index in range(batch)], list[Step]()
        for _, count in itertools.product(range(repeats), MODEL_DRAFT_COUNTS):  # in turns
            drafter.count = count
            steps[count] += timed_steps(llm, prompts)
            bare += timed_steps(without, prompts)
        plain = low_percentile([step.seconds for step in bare])
        for count in MODEL_DRAFT_COUNTS[1:]:
            # Before the end of an answer, and where a state is kept, there are fewer.
            full = [step for step in steps[count] if step.num_drafts == batch * count]
            verifying = low_percentile([step.seconds - step.drawing_s for step in full])
            drawing = low_percentile([step.drawing_s for step in full])
            gained = plain / (verifying + drawing)
            rows.append(
                {
                    "batch": batch,
                    "drafts": count,
                    "plain_ms": 1e3 * plain,
                    "undrafted_ms": 1e3 * statistics.median(step.seconds for step in steps[0]),
                    "plain_median_ms": 1e3 * statistics.median(step.seconds for step in bare),
                    "verifying_ms": 1e3 * verifying,
                    "pass_ms": 1e3 * drawing / count,
                    "speedup": {str(each): gained * num_expected(each, count) for each in ACCEPTANCES},
                }
            )
    return rows


def prompt_of_class(remainder: int, index: int) -> Prompt:
    """Return a prompt whose tokens are in the class of this remainder."""
    token_ids = [remainder + len(ACCEPTANCES) * (index * 977 + place * 31) for place in range(32)]
    return {"prompt_token_ids": [token_id % (len(ACCEPTANCES) * 25000) for token_id in token_ids]}


class Step(NamedTuple):
    """What a step took, and the draft model in it."""

    seconds: float
    drawing_s: float
    num_drafts: int


def timed_steps(llm: LLM, prompts: Sequence[Prompt]) -> list[Step]:
    """Return the steps after the first and before the last."""
    params = SamplingParams(temperature=0.0, max_tokens=DRAFT_NUM_OUT, ignore_eos=True)
    for prompt in prompts:
        llm.engine.add_request(prompt, params)
    metrics = llm.engine.front.outputs.metrics
    times = []
    while llm.engine.has_unfinished_requests():
        before = metrics.spec_decode_by_replica.get(0) or SpecDecodeStats(proposed=[], accepted=[])
        start_s = time.perf_counter()
        llm.engine.step()
        elapsed_s, after = time.perf_counter() - start_s, metrics.spec_decode_by_replica.get(0) or before
        times.append(Step(elapsed_s, after.draft_s - before.draft_s, sum(after.proposed) - sum(before.proposed)))
    return times[1:-1]


def low_percentile(seconds: list[float]) -> float:
    """Return the time of steps that nothing else on the machine disturbed."""
    return float(np.percentile(seconds, 5))


def num_expected(acceptance: float, count: int) -> float:
    """Return the expected tokens of a step that verifies `count` drafts."""
    return float(sum(acceptance**accepted for accepted in range(count + 1)))


def theory(acceptance: float) -> float:
    """Return the speed-up of the best number of drafts."""
    share = sum(parameter_counts(DRAFT)) / sum(parameter_counts(QWEN3_0_6B))
    return max(num_expected(acceptance, count) / (1.0 + count * share) for count in range(MAX_DRAFTS + 1))


def decode_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Return the seconds from the first token of any request to the last of all."""
    ends = [output.metrics.finished_time_s or 0.0 for output in outputs]
    return max(ends) - max(output.metrics.first_token_time_s or 0.0 for output in outputs)


def show(report: dict[str, Any]) -> None:
    for task, ways in report.get("tasks", {}).items():
        plain = ways["plain"]["tokens_per_s"]
        for way, cell in ways.items():
            print(
                f"{task:10} {way:14} {cell['tokens_per_s']:7.1f} tok/s {cell['tokens_per_s'] / plain:5.2f}x "
                f"{cell['num_accepted']:4} of {cell['num_drafts']:4} drafts, {cell['share_copied']:.0%} copied"
            )
    for row in report.get("costs", []):
        print(
            f"batch {row['batch']:2} drafts {row['drafts']:2} {row['step_ms']:7.1f} ms a step "
            f"{row['tokens_per_s']:7.1f} tok/s"
        )
    for row in report.get("draft_model", []):
        speedups = ", ".join(f"{value:.2f}x at {acceptance}" for acceptance, value in row["speedup"].items())
        print(
            f"batch {row['batch']:2} drafts {row['drafts']} plain {row['plain_ms']:.1f} ms (median "
            f"{row['plain_median_ms']:.1f}, not drafting {row['undrafted_ms']:.1f}), verifying "
            f"{row['verifying_ms']:.1f} ms, a pass {row['pass_ms']:.1f} ms: {speedups}"
        )
    if "draft_model" in report and not report["is_head"]:
        print("theory: " + ", ".join(f"{theory(each):.2f}x at {each}" for each in ACCEPTANCES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cost-geometry", action="store_true")
    parser.add_argument("--draft-model", action="store_true")
    parser.add_argument("--eagle", action="store_true")
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--batch", type=int, action="append", help="of --draft-model, --eagle and --mtp (repeatable)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = {"commit": commit.stdout.strip(), "machine": platform.processor(), "model": args.model}
    report["is_head"] = args.eagle or args.mtp
    if args.draft_model or report["is_head"]:
        measure = eagle_costs if args.eagle else mtp_costs if args.mtp else draft_costs
        with tempfile.TemporaryDirectory() as folder:
            report["draft_model"] = measure(Path(folder), args.batch or BATCHES, args.repeats)
    elif args.cost_geometry:
        with tempfile.TemporaryDirectory() as folder:
            report["costs"] = costs(write_checkpoint(Path(folder), QWEN3_0_6B), args.repeats)
    else:
        report["tasks"] = tasks(args.model, args.dtype, args.repeats)
    show(report)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
