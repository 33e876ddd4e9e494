"""`octavo bench serve`: load-tests any server with the OpenAI API, from the client's point of view.

An open loop (`--rate`, or all at once) simulates users who do not wait for each other; a closed loop (`--concurrency`)
a fixed number of users who do. The seed determines prompts, lengths and times before the run. Lengths are exact but for
prompts of `chat`, which are random words in place of token ids, and for prompts of a dataset.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from octavo.cli.client import HttpClient
from octavo.cli.datasets import Prompt, Sample, read_lines, read_sharegpt
from octavo.cli.load_report import RequestRecord, draw_run, encode_run, parse_ranks, parse_targets, summarize
from octavo.cli.options import with_derived_flags
from octavo.cli.terminal import print_reports
from octavo.config.option_types import AMOUNT, COUNT, POSITIVE, POSITIVE_FINITE, check_options, option
from octavo.errors import InvalidParameterError, RequestError

Endpoint = Literal["completions", "chat"]
Dataset = Literal["random", "sharegpt", "file"]
_USUAL_OUTPUT_LEN = "64"
_PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def parse_span(field: str, text: str, at_least: int) -> tuple[int, int]:
    """Parse `64` or `64:256`; raise InvalidParameterError if it is not a valid range from `at_least` on."""
    low, _, high = text.partition(":")
    try:
        span = int(low), int(high or low)
    except ValueError as error:
        raise InvalidParameterError(field, text, "must be like 64 or 64:256") from error
    if not at_least <= span[0] <= span[1]:
        raise InvalidParameterError(field, text, f"must be an ascending range from at least {at_least}")
    return span


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What to send. Raises InvalidParameterError: names the option, its value and the limit."""

    model: str | None = option(None, "model name; default: the server's first")
    endpoint: Endpoint = option("completions", "completions (random token ids) or chat (random words)")
    dataset: Dataset = option(
        "random", "random, sharegpt (a file of its JSON), or file (JSON lines with prompt or messages)",
        also="dataset-name",
    )  # fmt: skip
    dataset_path: str | None = option(None, "file of the dataset")
    num_prompts: int = option(100, "requests to send", COUNT)
    input_len: str = option(
        "128", "tokens per random prompt after its prefix; 64:256 is a range", also="random-input-len"
    )
    output_len: str | None = option(
        None,
        "tokens to generate per prompt, or a range; default: what the dataset says, else 64",
        also="random-output-len",
    )
    prefix_len: int = option(0, "tokens of a shared prefix", AMOUNT)
    num_prefixes: int = option(1, "number of shared prefixes", COUNT)
    token_ids: str = option("300:2000", "range of random token ids; the default fits any vocabulary")
    rate: float | None = option(None, "requests per second; default: all at once", POSITIVE, also="request-rate")
    burstiness: float = option(
        1.0, "how requests arrive: 1 is a Poisson process, less comes in bursts, more is more even", POSITIVE_FINITE
    )
    temperature: float = option(0.0, "sampling temperature", AMOUNT)
    seed: int = option(0, "seed of prompts, lengths and arrival times")

    def __post_init__(self) -> None:
        check_options(self)
        self._spans()
        if (self.dataset_path is None) != (self.dataset == "random"):
            limit = "none for random prompts" if self.dataset == "random" else f"a file is needed for {self.dataset}"
            raise InvalidParameterError("dataset_path", self.dataset_path, limit)
        if self.burstiness != 1.0 and self.rate is None:
            raise InvalidParameterError("burstiness", self.burstiness, "has no effect without --rate")

    def plan(self) -> list[RequestRecord]:
        """Return the requests of a run in the order of sending. Raises InvalidParameterError: about the dataset."""
        source = random.Random(self.seed)
        planned = []
        send_at_s = 0.0
        for prompt, num_tokens in self._random(source) if self.dataset == "random" else self._of_dataset(source):
            planned.append(RequestRecord(send_at_s, self._body(prompt, num_tokens), num_tokens))
            send_at_s += self._gap_s(source)
        return planned

    def _gap_s(self, source: random.Random) -> float:
        if self.rate is None:
            return 0.0
        if self.burstiness == 1.0:
            return source.expovariate(self.rate)
        return source.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))  # the same mean

    def _random(self, source: random.Random) -> Iterator[tuple[Prompt, int]]:
        """Yield prompts: one of `num_prefixes` shared prefixes in turn, followed by tokens of its own."""
        input_len, output_len, (first_id, last_id) = self._spans()
        ids = range(first_id, last_id + 1)
        prefixes = [source.choices(ids, k=self.prefix_len) for _ in range(self.num_prefixes)]
        for number in range(self.num_prompts):
            own = source.choices(ids, k=source.randint(*input_len))
            num_tokens = source.randint(*output_len)
            yield prefixes[number % len(prefixes)] + own, num_tokens

    def _of_dataset(self, source: random.Random) -> Iterator[tuple[Prompt, int]]:
        """Yield prompts of the dataset, none twice: a file's in their order, others drawn."""
        assert self.dataset_path is not None
        samples = read_lines(self.dataset_path) if self.dataset == "file" else read_sharegpt(self.dataset_path)
        if len(samples) < self.num_prompts:
            limit = f"at most {len(samples)}: the dataset has no more, and a prompt sent twice would meet a cache"
            raise InvalidParameterError("num_prompts", self.num_prompts, limit)
        chosen = samples[: self.num_prompts] if self.dataset == "file" else source.sample(samples, self.num_prompts)
        for sample in chosen:
            yield sample.prompt, self._output_len(sample, source)

    def _output_len(self, sample: Sample, source: random.Random) -> int:
        if self.output_len is None and sample.output_len is not None:
            return sample.output_len
        return source.randint(*self._spans()[1])

    def _spans(self) -> tuple[tuple[int, int], ...]:
        return (
            parse_span("input_len", self.input_len, 0 if self.prefix_len else 1),
            parse_span("output_len", self.output_len or _USUAL_OUTPUT_LEN, 1),
            parse_span("token_ids", self.token_ids, 0),
        )

    def _body(self, prompt: Prompt, output_len: int) -> bytes:
        return msgspec.json.encode(
            {
                **self._prompt_fields(prompt),
                "model": self.model,
                "max_tokens": output_len,
                "min_tokens": output_len,
                "ignore_eos": True,
                "temperature": self.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _prompt_fields(self, prompt: Prompt) -> dict[str, object]:
        is_conversation = isinstance(prompt, list) and isinstance(prompt[0], dict)
        if self.endpoint == "completions":
            if is_conversation:
                raise InvalidParameterError("endpoint", self.endpoint, "chat: the dataset has conversations")
            return {"prompt": prompt}
        if is_conversation:
            return {"messages": prompt}
        if not isinstance(prompt, str):  # short words: one or two tokens with most tokenizers
            numbers = [number for number in prompt if isinstance(number, int)]
            prompt = " ".join(f"{chr(97 + number % 26)}{chr(97 + number // 26 % 26)}" for number in numbers)
        return {"messages": [{"role": "user", "content": prompt}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How to send a workload, and where to report.

    Raises InvalidParameterError: names the option, its value and the limit.
    """

    url: str = option("http://127.0.0.1:8000", "server URL")
    api_key: str | None = option(None, "API key for the server")
    concurrency: int | None = option(None, "maximum number of requests in flight", COUNT, also="max-concurrency")
    percentiles: str = option("50,90,99", "percentiles of latencies to report", also="metric-percentiles")
    goodput: tuple[str, ...] = option((), "latency targets in ms, e.g. ttft:500,itl:50; also tpot, e2e")
    warmup: int = option(2, "warm-up requests", AMOUNT)
    timeout: float = option(600.0, "seconds until a request fails", POSITIVE)
    output: str | None = option(None, "write report and requests to this JSON file")
    plot: str | None = option(None, "plot the distributions to this SVG file")

    def __post_init__(self) -> None:
        check_options(self)
        for file in (self.output, self.plot):
            if file is not None and (not Path(file).parent.is_dir() or Path(file).is_dir()):
                raise InvalidParameterError("output", file, "must be in an existing folder")


@with_derived_flags
def serve(
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    *,
    workload: Workload,
    options: LoadOptions,
) -> None:
    """Benchmark a server under load: latency, throughput and goodput."""
    targets_ms, ranks = parse_targets(options.goodput), parse_ranks(options.percentiles)
    if workload.rate is not None and options.concurrency is not None:
        raise InvalidParameterError("concurrency", options.concurrency, "cannot be combined with --rate")
    with _runner() as runner:
        model, records, cpu_s = runner.run(_measure(workload, options))
    report = summarize(records, targets_ms, cpu_s, ranks)
    if options.output is not None:
        Path(options.output).write_bytes(encode_run(model, records, report))
        print(f"octavo: the run is in {options.output}", file=sys.stderr)
    if options.plot is not None:
        Path(options.plot).write_text(draw_run(model, records), encoding="utf-8")
        print(f"octavo: the plot of latencies is in {options.plot}", file=sys.stderr)
    print_reports([report], as_json=json)
    _raise_failures(records)


def _runner() -> asyncio.Runner:
    """Use uvloop if available: the client shares its cores with the server and should use as little CPU as possible."""
    if sys.platform == "win32":
        return asyncio.Runner()
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """Sends planned requests, whose records it fills. A failed one has an error; it does not end the run."""

    client: HttpClient
    path: str
    timeout_s: float

    async def run_open(self, planned: Sequence[RequestRecord]) -> None:
        """Send each request at its planned time after now."""
        start_s = time.perf_counter()
        tasks = []
        for record in planned:
            record.planned_s = start_s + record.send_at_s
            if (wait_s := record.planned_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._send(record)))
        await asyncio.gather(*tasks)

    async def run_closed(self, planned: Sequence[RequestRecord], concurrency: int) -> None:
        """Keep `concurrency` requests in flight."""
        queue = iter(planned)

        async def keep_one_in_flight() -> None:
            for record in queue:
                record.planned_s = time.perf_counter()
                await self._send(record)

        await asyncio.gather(*(keep_one_in_flight() for _ in range(concurrency)))

    async def _send(self, record: RequestRecord) -> None:
        record.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self.client.post(self.path, record.body, record.on_body)
            response.raise_for_status()
            record.end()
        except RequestError as error:
            record.end(str(error))
        except TimeoutError:
            record.end(f"no complete response within {self.timeout_s:g} s")


async def _measure(workload: Workload, options: LoadOptions) -> tuple[str, list[RequestRecord], float]:
    """Send all requests; return the model's name, the records, and the CPU seconds that this process used.

    The warm-up is random, of another seed, so that nothing of what is measured is in the server's cache. A warm-up
    request that fails ends the run.
    """
    async with HttpClient(options.url, api_key=options.api_key) as client:
        model = await client.find_model(workload.model)
        workload = replace(workload, model=model)
        planned = workload.plan()
        load = LoadGenerator(client, _PATHS[workload.endpoint], options.timeout)
        if options.warmup:
            other = replace(workload, seed=workload.seed + 1, num_prompts=options.warmup)
            warmup = replace(other, dataset="random", dataset_path=None).plan()
            await load.run_closed(warmup, 1)
            _raise_failures(warmup)
        start_cpu_s = time.process_time()
        count = options.concurrency
        await (load.run_open(planned) if count is None else load.run_closed(planned, count))
        return model, planned, time.process_time() - start_cpu_s


def _raise_failures(records: Sequence[RequestRecord]) -> None:
    """Raise an error with the number of failed requests and the first few messages, if any failed."""
    errors = [record.error for record in records if record.error is not None]
    if errors:
        shown = "; ".join(dict.fromkeys(errors[:3]))
        raise RequestError(f"{len(errors)} of {len(records)} requests failed: {shown}")
