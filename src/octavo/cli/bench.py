"""`octavo bench throughput|latency`: offline speed of a model, with random prompts and outputs of fixed length.

`octavo bench serve`, which measures a server from outside, is in `octavo.cli.load`.

Speed at given lengths does not depend on the generated text, so dummy weights will do: `octavo bench latency --model
FOLDER --load-format dummy`.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.bench_adapters import adapter_options, random_adapters
from octavo.cli.load.command import serve
from octavo.cli.options import TYPER_SETTINGS, EngineOptions, with_derived_flags
from octavo.cli.report import Report, print_reports, spread
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.inputs import TokensPrompt
    from octavo.llm import LLM
    from octavo.lora_request import LoRARequest
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

PROMPT_SEED = 0
WARM_UP_TOKENS = 2  # per prompt, before throughput is measured: the first run allocates memory that later ones reuse

app = typer.Typer(**{**TYPER_SETTINGS, "no_args_is_help": True})

InputLen = Annotated[int, typer.Option("--input-len", help="tokens per prompt", min=1)]
OutputLen = Annotated[int, typer.Option("--output-len", help="tokens to generate per prompt", min=1)]
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
    num_adapters: NumAdapters = 0,
    adapter_rank: AdapterRank = 16,
    json: AsJson = False,
    *,
    engine: EngineOptions,
) -> None:
    """Tokens per second when many requests are submitted at once."""
    llm = _open(adapter_options(num_adapters, adapter_rank, engine))
    with random_adapters(llm.engine.front.config.model, num_adapters, adapter_rank) as adapters:
        prompts = RandomPrompts(llm, input_len, adapters)
        _timed(llm, prompts, num_prompts, min(output_len, WARM_UP_TOKENS))
        outputs, elapsed_s = _timed(llm, prompts, num_prompts, output_len)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    report: Report = {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        **({"num_adapters": num_adapters, "adapter_rank": adapter_rank} if num_adapters else {}),
        "elapsed_s": elapsed_s,
        "requests_per_s": num_prompts / elapsed_s,
        "output_tokens_per_s": num_output_tokens / elapsed_s,
        "total_tokens_per_s": (num_output_tokens + num_prompts * input_len) / elapsed_s,
        **request_times(outputs),
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
    num_adapters: NumAdapters = 0,
    adapter_rank: AdapterRank = 16,
    json: AsJson = False,
    *,
    engine: EngineOptions,
) -> None:
    """Seconds that a batch takes from the first prompt token to the last output token."""
    llm = _open(adapter_options(num_adapters, adapter_rank, engine))
    with random_adapters(llm.engine.front.config.model, num_adapters, adapter_rank) as adapters:
        prompts = RandomPrompts(llm, input_len, adapters)
        reports = [_latency(llm, prompts, size, output_len, num_iters, num_warmup) for size in batch_size or [1]]
    print_reports(reports, as_json=json)


def _latency(
    llm: "LLM", prompts: "RandomPrompts", size: int, output_len: int, num_iters: int, num_warmup: int
) -> Report:
    for _ in range(num_warmup):
        _timed(llm, prompts, size, output_len)
    runs = [_timed(llm, prompts, size, output_len) for _ in range(num_iters)]
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
        **request_times(outputs),
    }


class RandomPrompts:
    """Prompts of random ordinary tokens, never the same twice, so that the prefix cache never hits."""

    def __init__(self, llm: "LLM", length: int, adapters: "Sequence[LoRARequest]" = ()) -> None:
        import random

        self.adapters = adapters

        tokenizer = llm.get_tokenizer()
        self.length = length
        self._ids = [id_ for id_ in range(tokenizer.vocab_size) if id_ not in tokenizer.special_token_ids]
        self._random = random.Random(PROMPT_SEED)

    def adapters_of(self, count: int) -> "list[LoRARequest | None]":
        """Return the adapter of each of `count` prompts."""
        return [self.adapters[at % len(self.adapters)] if self.adapters else None for at in range(count)]

    def take(self, count: int) -> "list[TokensPrompt]":
        return [{"prompt_token_ids": self._random.choices(self._ids, k=self.length)} for _ in range(count)]


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


def _open(engine: dict[str, Any]) -> "LLM":
    from octavo import LLM

    return LLM(**engine)


def _timed(llm: "LLM", prompts: RandomPrompts, count: int, output_len: int) -> "tuple[list[RequestOutput], float]":
    params, taken, adapters = _params(output_len), prompts.take(count), prompts.adapters_of(count)
    started_s = time.perf_counter()
    outputs = llm.generate(taken, params, use_tqdm=False, lora_request=adapters)
    elapsed_s = time.perf_counter() - started_s
    for output in outputs:
        if len(output.outputs[0].token_ids) != output_len:
            why = output.outputs[0].error or output.outputs[0].finish_reason
            raise RequestError(f"{output.request_id} ended early: {why}")
    return outputs, elapsed_s


def _params(output_len: int) -> "SamplingParams":
    from octavo.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True)
