"""`octavo bench throughput|latency`: offline speed of a model, with random prompts and outputs of fixed length.

With `--num-images`, each prompt is a message with that many random pictures before its text.

`octavo bench serve`, which measures a server from outside, is in `octavo.cli.load`.

Speed at given lengths does not depend on the generated text, so dummy weights will do: `octavo bench latency --model
FOLDER --load-format dummy`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.bench_adapters import adapter_options, random_adapters
from octavo.cli.bench_prompts import Prompts, RandomPictures, RandomPrompts, Run
from octavo.cli.load.command import serve
from octavo.cli.options import TYPER_SETTINGS, EngineOptions, with_derived_flags
from octavo.cli.report import Report, print_reports, spread
from octavo.contracts.engine import SpecDecodeStats
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

WARM_UP_TOKENS = 2  # per prompt, before throughput is measured: the first run allocates memory that later ones reuse

app = typer.Typer(**{**TYPER_SETTINGS, "no_args_is_help": True})

InputLen = Annotated[int, typer.Option("--input-len", help="tokens per prompt", min=1)]
OutputLen = Annotated[int, typer.Option("--output-len", help="tokens to generate per prompt", min=1)]
NumImages = Annotated[
    int, typer.Option("--num-images", help="random pictures per prompt, in addition to its tokens", min=0)
]
ImageSize = Annotated[
    str, typer.Option("--image-size", help="their width and height in pixels", metavar="<width>x<height>")
]
NumAdapters = Annotated[
    int, typer.Option("--num-adapters", help="random LoRA adapters, which the prompts use in turn", min=0)
]
AdapterRank = Annotated[int, typer.Option("--adapter-rank", help="their rank", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def bench() -> None:
    """Measure throughput or latency with random prompts, or benchmark a server."""


app.command()(serve)


@app.command()
@with_derived_flags
def throughput(
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="requests, all submitted at once", min=1)] = 64,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    num_images: NumImages = 0,
    image_size: ImageSize = "448x448",
    num_adapters: NumAdapters = 0,
    adapter_rank: AdapterRank = 16,
    json: AsJson = False,
    *,
    engine: EngineOptions,
) -> None:
    """Tokens per second, and images, when many requests are submitted at once."""
    with _prompts(engine, input_len, num_images, image_size, num_adapters, adapter_rank) as prompts:
        _timed(prompts.take(num_prompts), min(output_len, WARM_UP_TOKENS))
        before, drafts_before = step_times(prompts.llm), drafts_by_position(prompts.llm)
        outputs, elapsed_s = _timed(prompts.take(num_prompts), output_len)
        share = compute_share(before, step_times(prompts.llm))
        by_position = draft_acceptance(drafts_before, drafts_by_position(prompts.llm))
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_tokens = num_output_tokens + sum(len(output.prompt_token_ids) for output in outputs)
    report: Report = {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        **({"num_adapters": num_adapters, "adapter_rank": adapter_rank} if num_adapters else {}),
        "elapsed_s": elapsed_s,
        "requests_per_s": num_prompts / elapsed_s,
        "output_tokens_per_s": num_output_tokens / elapsed_s,
        "total_tokens_per_s": num_tokens / elapsed_s,
        **_images(prompts, num_prompts / elapsed_s),
        **request_times(outputs),
        **share,
        **drafts(outputs),
        **by_position,
    }
    print_reports([report], as_json=json)


@app.command()
@with_derived_flags
def latency(
    batch_size: Annotated[
        list[int] | None,
        typer.Option("--batch-size", help="number of requests in the batch (repeatable) [default: 1]", metavar="<int>"),
    ] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    num_iters: Annotated[int, typer.Option("--num-iters", help="measured runs per batch size", min=1)] = 5,
    num_warmup: Annotated[int, typer.Option("--num-warmup", help="warm-up runs before those", min=0)] = 1,
    num_images: NumImages = 0,
    image_size: ImageSize = "448x448",
    num_adapters: NumAdapters = 0,
    adapter_rank: AdapterRank = 16,
    json: AsJson = False,
    *,
    engine: EngineOptions,
) -> None:
    """Seconds that a batch takes from the first prompt token to the last output token."""
    with _prompts(engine, input_len, num_images, image_size, num_adapters, adapter_rank) as prompts:
        reports = [_latency(prompts, size, output_len, num_iters, num_warmup) for size in batch_size or [1]]
    print_reports(reports, as_json=json)


def _latency(prompts: Prompts, size: int, output_len: int, num_iters: int, num_warmup: int) -> Report:
    for _ in range(num_warmup):
        _timed(prompts.take(size), output_len)
    before, drafts_before = step_times(prompts.llm), drafts_by_position(prompts.llm)
    runs = [_timed(prompts.take(size), output_len) for _ in range(num_iters)]
    outputs = [output for batch, _ in runs for output in batch]
    elapsed_s = [seconds for _, seconds in runs]
    return {
        "batch_size": size,
        "input_len": prompts.length,
        "output_len": output_len,
        "num_iters": num_iters,
        **({"num_adapters": len(prompts.adapters)} if prompts.adapters else {}),
        **spread("latency_ms", [seconds * 1e3 for seconds in elapsed_s]),
        "output_tokens_per_s": size * output_len * num_iters / sum(elapsed_s),
        **_images(prompts, size * num_iters / sum(elapsed_s)),
        **request_times(outputs),
        **compute_share(before, step_times(prompts.llm)),
        **drafts(outputs),
        **draft_acceptance(drafts_before, drafts_by_position(prompts.llm)),
    }


def step_times(llm: "LLM") -> tuple[float, float]:
    """Return the seconds of all steps so far, and of these the seconds in native calls."""
    stats = llm.engine.front.outputs.metrics.stats
    return (0.0, 0.0) if stats is None else (stats.step_s_total, stats.compute_s_total)


def compute_share(before: tuple[float, float], after: tuple[float, float]) -> Report:
    """Return the share of steps in native calls between two `step_times`; nothing where calls are not timed.

    The rest is the host's: scheduling, laying out inputs, detokenizing.
    """
    step_s, compute_s = (end - start for start, end in zip(before, after, strict=True))
    return {"compute_share": compute_s / step_s} if step_s else {}


def request_times(outputs: "Sequence[RequestOutput]") -> Report:
    """Return time to first token and time per output token as percentiles over requests, in milliseconds."""
    first_ms = []
    per_token_ms = []
    for output in outputs:
        metrics = output.metrics
        if metrics.first_token_time_s is None or metrics.finished_time_s is None:
            continue  # no tokens; _timed has already raised
        first_ms.append((metrics.first_token_time_s - metrics.arrival_time_s) * 1e3)
        num_later = len(output.outputs[0].token_ids) - 1
        if num_later:
            per_token_ms.append((metrics.finished_time_s - metrics.first_token_time_s) / num_later * 1e3)
    return spread("time_to_first_token_ms", first_ms) | spread("time_per_output_token_ms", per_token_ms)


def drafts(outputs: "Sequence[RequestOutput]") -> Report:
    """Return how many drafts were verified, the share of them that was accepted, and the tokens that a request got in
    a step because of them; nothing if there were none."""
    num_drafts = sum(output.metrics.num_drafts for output in outputs)
    num_accepted = sum(output.metrics.num_accepted_drafts for output in outputs)
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    if not num_drafts:
        return {}
    return {
        "num_drafts": num_drafts,
        "draft_acceptance": num_accepted / num_drafts,
        "tokens_per_step": num_tokens / (num_tokens - num_accepted),
    }


def drafts_by_position(llm: "LLM") -> list[tuple[int, int]]:
    """Return the drafts verified and accepted so far, by position in the draft; nothing without a drafter."""
    parts = list(llm.engine.front.outputs.metrics.spec_decode_by_replica.values())
    if not parts:
        return []
    total = SpecDecodeStats.sum(parts)
    return list(zip(total.proposed, total.accepted, strict=True))


def draft_acceptance(before: "Sequence[tuple[int, int]]", after: "Sequence[tuple[int, int]]") -> Report:
    """Return the share of accepted drafts between two `drafts_by_position`, of each position that had any."""
    report: Report = {}
    for position, (verified, accepted) in enumerate(after):
        old_verified, old_accepted = before[position] if before else (0, 0)
        if verified > old_verified:
            report[f"draft_acceptance_at_{position}"] = (accepted - old_accepted) / (verified - old_verified)
    return report


def _open(engine: dict[str, Any]) -> "LLM":
    from octavo import LLM

    return LLM(**engine)


@contextmanager
def _prompts(
    engine: EngineOptions, input_len: int, num_images: int, image_size: str, num_adapters: int, adapter_rank: int
) -> Iterator[Prompts]:
    llm = _open(adapter_options(num_adapters, adapter_rank, engine))
    with random_adapters(llm.engine.front.config.model, num_adapters, adapter_rank) as adapters:
        if num_images:
            yield RandomPictures(llm, input_len, num_images, image_size, adapters)
        else:
            yield RandomPrompts(llm, input_len, adapters)


def _images(prompts: Prompts, requests_per_s: float) -> Report:
    """Return the report's entries about images: none if there are no images."""
    if not isinstance(prompts, RandomPictures):
        return {}
    return {"num_images": prompts.num_images, "images_per_s": prompts.num_images * requests_per_s}


def _timed(run: Run, output_len: int) -> "tuple[list[RequestOutput], float]":
    params = _params(output_len)
    started_s = time.perf_counter()
    outputs = run(params)
    elapsed_s = time.perf_counter() - started_s
    for output in outputs:
        if len(output.outputs[0].token_ids) != output_len:
            why = output.outputs[0].error or output.outputs[0].finish_reason
            raise RequestError(f"{output.request_id} ended early: {why}")
    return outputs, elapsed_s


def _params(output_len: int) -> "SamplingParams":
    from octavo.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True)
