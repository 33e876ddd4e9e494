"""`octavo bench throughput|latency`: offline speed of a model, with random prompts and outputs of fixed length.

Prompts are never the same twice, so that no cache ever hits. Speed at given lengths does not depend on the generated
text, so dummy weights will do: `octavo bench latency --model FOLDER --load-format dummy`.
"""

import json as json_codec
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.load_test import serve
from octavo.cli.options import TYPER_SETTINGS, EngineOptions, with_derived_flags
from octavo.cli.terminal import Report, print_reports, spread
from octavo.config.option_types import AMOUNT, COUNT, check_options, option
from octavo.errors import InvalidParameterError, RequestError

if TYPE_CHECKING:
    from octavo.config.model import ModelConfig
    from octavo.inputs import TokensPrompt
    from octavo.llm import LLM
    from octavo.lora_request import LoRARequest
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

WARM_UP_TOKENS = 2  # per prompt, before throughput is measured: the first run allocates memory that later ones reuse
_SEED = 0

bench = typer.Typer(**{**TYPER_SETTINGS, "no_args_is_help": True})

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What each prompt is. Raises InvalidParameterError: names the option, its value and the limit."""

    input_len: int = option(128, "tokens per prompt", COUNT)
    output_len: int = option(64, "tokens to generate per prompt", COUNT)
    num_images: int = option(0, "random pictures per prompt, in addition to its tokens", AMOUNT)
    image_size: str = option("448x448", "their width x height in pixels")
    num_adapters: int = option(0, "random LoRA adapters, which the prompts use in turn", AMOUNT)
    adapter_rank: int = option(16, "their rank", COUNT)

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_images and not prod(self.pixels):
            limit = "a width and a height in pixels, such as 448x448"
            raise InvalidParameterError("image_size", self.image_size, limit)

    @property
    def pixels(self) -> tuple[int, ...]:
        """Width and height of images."""
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", self.image_size)
        return tuple(map(int, found.groups())) if found else (0, 0)


@bench.callback()
def _bench() -> None:
    """Measure throughput or latency with random prompts, or benchmark a server."""


bench.command()(serve)


@bench.command()
@with_derived_flags
def throughput(
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="requests, all submitted at once", min=1)] = 64,
    json: AsJson = False,
    *,
    prompts: BenchOptions,
    engine: EngineOptions,
) -> None:
    """Tokens per second, and images, when many requests are submitted at once."""
    with _open(engine, prompts) as runner:
        runner.run(num_prompts, min(prompts.output_len, WARM_UP_TOKENS))
        outputs, (elapsed_s,), measured = runner.measure(num_prompts, prompts.output_len, num_runs=1)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_tokens = num_output_tokens + sum(len(output.prompt_token_ids) for output in outputs)
    of_adapters: Report = {"num_adapters": prompts.num_adapters, "adapter_rank": prompts.adapter_rank}
    report: Report = {
        "num_prompts": num_prompts,
        "input_len": prompts.input_len,
        "output_len": prompts.output_len,
        **(of_adapters if prompts.num_adapters else {}),
        "elapsed_s": elapsed_s,
        "requests_per_s": num_prompts / elapsed_s,
        "output_tokens_per_s": num_output_tokens / elapsed_s,
        "total_tokens_per_s": num_tokens / elapsed_s,
        **measured,
    }
    print_reports([report], as_json=json)


@bench.command()
@with_derived_flags
def latency(
    batch_size: Annotated[
        list[int] | None,
        typer.Option("--batch-size", help="number of requests in the batch (repeatable) [default: 1]", metavar="<int>"),
    ] = None,
    num_iters: Annotated[int, typer.Option("--num-iters", help="measured runs per batch size", min=1)] = 5,
    num_warmup: Annotated[int, typer.Option("--num-warmup", help="warm-up runs before those", min=0)] = 1,
    json: AsJson = False,
    *,
    prompts: BenchOptions,
    engine: EngineOptions,
) -> None:
    """Seconds that a batch takes from the first prompt token to the last output token."""
    reports: list[Report] = []
    with _open(engine, prompts) as runner:
        for size in batch_size or [1]:
            for _ in range(num_warmup):
                runner.run(size, prompts.output_len)
            _, elapsed_s, measured = runner.measure(size, prompts.output_len, num_runs=num_iters)
            reports.append(
                {
                    "batch_size": size,
                    "input_len": prompts.input_len,
                    "output_len": prompts.output_len,
                    "num_iters": num_iters,
                    **({"num_adapters": prompts.num_adapters} if prompts.num_adapters else {}),
                    **spread("latency_ms", [seconds * 1e3 for seconds in elapsed_s]),
                    "output_tokens_per_s": size * prompts.output_len * num_iters / sum(elapsed_s),
                    **measured,
                }
            )
    print_reports(reports, as_json=json)


@contextmanager
def _open(engine: EngineOptions, prompts: BenchOptions) -> "Iterator[BenchRunner]":
    from octavo import LLM

    slots: dict[str, Any] = {"max_loras": prompts.num_adapters, "max_lora_rank": prompts.adapter_rank}
    llm = LLM(**{**({"enable_lora": True, **slots} if prompts.num_adapters else {}), **engine})
    with tempfile.TemporaryDirectory(prefix="octavo-adapters-") as folder:
        adapters = _random_adapters(llm.engine.front.config.model, prompts, Path(folder))
        yield BenchRunner(llm, prompts, adapters)


class BenchRunner:
    """Runs batches of random prompts, or messages of about that length, and reports what they took."""

    def __init__(self, llm: "LLM", prompts: BenchOptions, adapters: "Sequence[LoRARequest]") -> None:
        import numpy as np

        self._llm, self._prompts, self._adapters = llm, prompts, adapters
        self._tokenizer = llm.get_tokenizer()
        num_ids = min(self._tokenizer.vocab_size, llm.engine.front.config.model.vocab_size)
        self._ids = [id_ for id_ in range(num_ids) if id_ not in self._tokenizer.special_token_ids]
        self._random, self._pixels = random.Random(_SEED), np.random.default_rng(_SEED)

    def run(self, count: int, output_len: int) -> "tuple[list[RequestOutput], float]":
        """Run that many prompts as one batch; return the outputs and the seconds.

        Raises RequestError: an output ended early.
        """
        from octavo.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True)
        run_batch = self._batch(count)
        started_s = time.perf_counter()
        outputs = run_batch(params)
        elapsed_s = time.perf_counter() - started_s
        for output in outputs:
            if len(output.outputs[0].token_ids) != output_len:
                why = output.outputs[0].error or output.outputs[0].finish_reason
                raise RequestError(f"{output.request_id} ended early: {why}")
        return outputs, elapsed_s

    def measure(
        self, count: int, output_len: int, *, num_runs: int
    ) -> "tuple[list[RequestOutput], list[float], Report]":
        """Run batches; return all outputs, the seconds of each run, and a report about images, times and drafts."""
        times_before, drafts_before = self._step_times(), self._drafts_by_position()
        runs = [self.run(count, output_len) for _ in range(num_runs)]
        outputs, elapsed_s = [output for batch, _ in runs for output in batch], [seconds for _, seconds in runs]
        step_s, compute_s = (end - start for start, end in zip(times_before, self._step_times(), strict=True))
        report: Report = {}
        if num_images := self._prompts.num_images:
            per_s = num_images * count * num_runs / sum(elapsed_s)
            report = {"num_images": num_images, "images_per_s": per_s}
        report |= request_times(outputs)
        if step_s:  # the rest is the host's: scheduling, laying out inputs, detokenizing
            report["compute_share"] = compute_s / step_s
        report |= _draft_report(outputs)
        for position, (verified, accepted) in enumerate(self._drafts_by_position()):
            old_verified, old_accepted = drafts_before[position] if drafts_before else (0, 0)
            if verified > old_verified:
                share = (accepted - old_accepted) / (verified - old_verified)
                report[f"draft_acceptance_at_{position}"] = share
        return outputs, elapsed_s, report

    def _batch(self, count: int) -> "Callable[[SamplingParams], list[RequestOutput]]":
        """Make that many prompts; return a function that runs them as one batch."""
        llm, adapters = self._llm, self._adapters
        loras = [adapters[at % len(adapters)] if adapters else None for at in range(count)]
        if self._prompts.num_images:
            requests = [{"messages": [{"role": "user", "content": self._content()}]} for _ in range(count)]
            return lambda params: llm.generate_multimodal(requests, params, use_tqdm=False, lora_request=loras)
        prompts: list[TokensPrompt] = [{"prompt_token_ids": self._tokens()} for _ in range(count)]
        return lambda params: llm.generate(prompts, params, use_tqdm=False, lora_request=loras)

    def _tokens(self) -> list[int]:
        return self._random.choices(self._ids, k=self._prompts.input_len)

    def _content(self) -> list[dict[str, object]]:
        width, height = self._prompts.pixels
        parts: list[dict[str, object]] = [
            {"type": "image", "image": self._pixels.integers(0, 256, (height, width, 3), "uint8")}
            for _ in range(self._prompts.num_images)
        ]
        return [*parts, {"type": "text", "text": self._tokenizer.decode(self._tokens())}]

    def _step_times(self) -> tuple[float, float]:
        """Return the seconds of all steps so far, and of these the seconds in native calls; 0 where not timed."""
        stats = self._llm.engine.front.outputs.metrics.stats
        return (0.0, 0.0) if stats is None else (stats.step_s_total, stats.compute_s_total)

    def _drafts_by_position(self) -> list[tuple[int, int]]:
        """Return the drafts verified and accepted so far, by position in the draft; nothing without a drafter."""
        from octavo.contracts.engine import SpecDecodeStats

        parts = list(self._llm.engine.front.outputs.metrics.spec_decode_by_replica.values())
        if not parts:
            return []
        total = SpecDecodeStats.sum(parts)
        return list(zip(total.proposed, total.accepted, strict=True))


def request_times(outputs: "Sequence[RequestOutput]") -> Report:
    """Return time to first token and time per output token as percentiles over requests, in milliseconds."""
    first_ms = []
    per_token_ms = []
    for output in outputs:
        metrics = output.metrics
        if metrics.first_token_time_s is None or metrics.finished_time_s is None:
            continue  # no tokens; `run` has already raised
        first_ms.append((metrics.first_token_time_s - metrics.arrival_time_s) * 1e3)
        num_later = len(output.outputs[0].token_ids) - 1
        if num_later:
            per_token_ms.append((metrics.finished_time_s - metrics.first_token_time_s) / num_later * 1e3)
    return spread("time_to_first_token_ms", first_ms) | spread("time_per_output_token_ms", per_token_ms)


def _draft_report(outputs: "Sequence[RequestOutput]") -> Report:
    """Return how many drafts were verified, the share that was accepted, and the tokens of a request in a step."""
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


def _random_adapters(config: "ModelConfig", prompts: BenchOptions, folder: Path) -> "list[LoRARequest]":
    """Write adapters for all linears of a model's layers, or for attention alone where there are experts.

    They share one file of weights and differ in alpha, so that each is an adapter of its own to the engine.
    """
    count, rank = prompts.num_adapters, prompts.adapter_rank
    if not count:
        return []
    import numpy as np
    from safetensors.numpy import save_file

    from octavo.lora_request import LoRARequest

    values, tensors = np.random.default_rng(_SEED), {}
    for layer in range(config.num_layers):
        for module, (outputs, inputs) in _linears(config).items():
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{kind}.weight"
                tensors[name] = 1e-3 * values.standard_normal(shape, dtype=np.float32)
    weights = folder / "weights.safetensors"
    save_file(tensors, weights)
    adapters = []
    for number in range(1, count + 1):
        own = folder / f"adapter-{number}"
        own.mkdir()
        (own / "adapter_model.safetensors").symlink_to(weights)
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + number / 1024}
        (own / "adapter_config.json").write_text(json_codec.dumps(settings))
        adapters.append(LoRARequest(own.name, number, own))
    return adapters


def _linears(config: "ModelConfig") -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a layer's linears, of those that adapters can change."""
    width, spec = config.hidden_size, config.attention(0)
    of_heads, of_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {
        "self_attn.q_proj": (of_heads, width),
        "self_attn.k_proj": (of_kv, width),
        "self_attn.v_proj": (of_kv, width),
        "self_attn.o_proj": (width, of_heads),
    }
    if spec.latent is not None:
        attention = {"self_attn.o_proj": (width, spec.num_heads * spec.latent.value_size)}
    if config.experts is not None or config.dense is None:
        return attention
    inner = config.dense.intermediate_size
    gates = {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    return attention | gates
