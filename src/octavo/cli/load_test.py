"""`octavo bench serve`: load-tests any server with the OpenAI API, from the client's point of view.

An open loop (`--rate`, or all at once) simulates users who do not wait for each other; a closed loop (`--concurrency`)
a fixed number of users who do. Prompts, lengths and times are determined by the seed before the run. Prompts for
`completions` are random token ids, so their lengths are exact, and `ignore_eos` makes output lengths exact. `chat`
sends random words instead, whose prompt lengths are approximate.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
import typer

from octavo.cli.client import HttpClient
from octavo.cli.load_report import RequestRecord, Slo, draw_run, encode_run, summarize
from octavo.cli.terminal import print_reports
from octavo.errors import InvalidParameterError, RequestError

Endpoint = Literal["completions", "chat"]
_PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def serve(
    url: Annotated[str, typer.Option("--url", help="server URL", metavar="<url>")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="model name; default: the server's first")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key for the server", metavar="<str>")] = None,
    endpoint: Annotated[
        Endpoint, typer.Option("--endpoint", help="completions (random token ids) or chat (random words)")
    ] = "completions",
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="requests to send", min=1)] = 100,
    input_len: Annotated[
        str, typer.Option("--input-len", help="tokens per prompt after its prefix; 64:256 is a range")
    ] = "128",
    output_len: Annotated[str, typer.Option("--output-len", help="tokens to generate per prompt, or a range")] = "64",
    prefix_len: Annotated[int, typer.Option("--prefix-len", help="tokens of a shared prefix", min=0)] = 0,
    num_prefixes: Annotated[int, typer.Option("--num-prefixes", help="number of shared prefixes", min=1)] = 1,
    token_ids: Annotated[
        str, typer.Option("--token-ids", help="range of random token ids; the default fits any vocabulary")
    ] = "300:2000",
    rate: Annotated[float | None, typer.Option("--rate", help="requests per second (Poisson process)")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="maximum number of requests in flight", min=1)
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="sampling temperature", min=0.0)] = 0.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", help="latency targets in ms, e.g. ttft:500,itl:50; also tpot, e2e", metavar="<str>"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="seed of prompts, lengths and arrival times")] = 0,
    warmup: Annotated[int, typer.Option("--warmup", help="warm-up requests", min=0)] = 2,
    timeout: Annotated[float, typer.Option("--timeout", help="seconds until a request fails")] = 600.0,
    output: Annotated[
        Path | None, typer.Option("--output", help="write report and requests to this JSON file", metavar="<path>")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="plot the distributions to this SVG file", metavar="<path>")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Benchmark a server under load: latency, throughput and goodput."""
    slo = Slo.parse(goodput or [])
    _check(rate, concurrency, timeout, [file for file in (output, plot) if file is not None])
    workload = Workload(
        endpoint=endpoint,
        model=model,
        num_prompts=num_prompts,
        input_len=Span.parse("input_len", input_len, 0 if prefix_len else 1),
        output_len=Span.parse("output_len", output_len, 1),
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
        token_ids=Span.parse("token_ids", token_ids, 0),
        rate=rate,
        temperature=temperature,
        seed=seed,
    )
    with _runner() as runner:
        workload, records, cpu_s = runner.run(_measure(workload, url, api_key, concurrency, warmup, timeout))
    report = summarize(records, slo, cpu_s)
    if output is not None:
        output.write_bytes(encode_run(str(workload.model), records, report))
        print(f"octavo: the run is in {output}", file=sys.stderr)
    if plot is not None:
        plot.write_text(draw_run(str(workload.model), records), encoding="utf-8")
        print(f"octavo: the plot of latencies is in {plot}", file=sys.stderr)
    print_reports([report], as_json=json)
    _raise_failures(records)


def _check(rate: float | None, concurrency: int | None, timeout_s: float, files: list[Path]) -> None:
    """Check the options before anything is measured."""
    if rate is not None and not rate > 0:
        raise InvalidParameterError("rate", rate, "greater than 0")
    if rate is not None and concurrency is not None:
        raise InvalidParameterError("concurrency", concurrency, "cannot be combined with --rate")
    if not timeout_s > 0:
        raise InvalidParameterError("timeout", timeout_s, "greater than 0")
    for file in files:
        if not file.parent.is_dir() or file.is_dir():
            raise InvalidParameterError("output", str(file), "must be in an existing folder")


def _runner() -> asyncio.Runner:
    """Use uvloop if available: the client shares its cores with the server and should use as little CPU as possible."""
    if sys.platform == "win32":
        return asyncio.Runner()
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


@dataclass(frozen=True, slots=True)
class Span:
    """A range of integers from `low` to `high`, inclusive."""

    low: int
    high: int

    @classmethod
    def parse(cls, field: str, text: str, at_least: int) -> Self:
        """Parse `64` or `64:256`.

        Raises:
            InvalidParameterError: not a valid range, or below `at_least`.
        """
        low, _, high = text.partition(":")
        try:
            span = cls(int(low), int(high or low))
        except ValueError as error:
            raise InvalidParameterError(field, text, "must be like 64 or 64:256") from error
        if not at_least <= span.low <= span.high:
            raise InvalidParameterError(field, text, f"must be an ascending range from at least {at_least}")
        return span


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request: `send_at_s` after the start of the run, with this body; `output_len` tokens are expected."""

    send_at_s: float
    body: bytes
    output_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What to send. `rate` is in requests per second (Poisson process); None: all at once.

    `model` is None until the server's own model is known.
    """

    endpoint: Endpoint
    model: str | None
    num_prompts: int
    input_len: Span
    output_len: Span
    prefix_len: int
    num_prefixes: int
    token_ids: Span
    rate: float | None
    temperature: float
    seed: int

    def plan(self) -> list[PlannedRequest]:
        """Return the requests of a run in the order of sending.

        Each prompt starts with one of `num_prefixes` shared prefixes in turn, followed by tokens of its own.
        """
        source = random.Random(self.seed)
        ids = range(self.token_ids.low, self.token_ids.high + 1)
        prefixes = [source.choices(ids, k=self.prefix_len) for _ in range(self.num_prefixes)]
        planned = []
        send_at_s = 0.0
        for number in range(self.num_prompts):
            own = source.choices(ids, k=source.randint(self.input_len.low, self.input_len.high))
            output_len = source.randint(self.output_len.low, self.output_len.high)
            body = self._body(prefixes[number % len(prefixes)] + own, output_len)
            planned.append(PlannedRequest(send_at_s=send_at_s, body=body, output_len=output_len))
            send_at_s += source.expovariate(self.rate) if self.rate else 0.0
        return planned

    def _body(self, prompt: list[int], output_len: int) -> bytes:
        fields: dict[str, object] = {"prompt": prompt}
        if self.endpoint == "chat":  # short words: one or two tokens with most tokenizers
            words = " ".join(f"{chr(97 + number % 26)}{chr(97 + number // 26 % 26)}" for number in prompt)
            fields = {"messages": [{"role": "user", "content": words}]}
        return msgspec.json.encode(
            {
                **fields,
                "model": self.model,
                "max_tokens": output_len,
                "min_tokens": output_len,
                "ignore_eos": True,
                "temperature": self.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


class LoadGenerator:
    """Sends planned requests and records each. A failed request is a record with an error; it does not end the run."""

    def __init__(self, client: HttpClient, endpoint: Endpoint, timeout_s: float) -> None:
        self._client = client
        self._path = _PATHS[endpoint]
        self._timeout_s = timeout_s

    async def run_open(self, planned: Sequence[PlannedRequest]) -> list[RequestRecord]:
        """Send each request at its planned time after now."""
        start_s = time.perf_counter()
        tasks = []
        for request in planned:
            due_s = start_s + request.send_at_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._send(request, due_s)))
        return await asyncio.gather(*tasks)

    async def run_closed(self, planned: Sequence[PlannedRequest], concurrency: int) -> list[RequestRecord]:
        """Keep `concurrency` requests in flight."""
        queue = iter(planned)

        async def keep_one_in_flight() -> list[RequestRecord]:
            return [await self._send(request, time.perf_counter()) for request in queue]

        parts = await asyncio.gather(*(keep_one_in_flight() for _ in range(concurrency)))
        return [record for part in parts for record in part]

    async def _send(self, request: PlannedRequest, due_s: float) -> RequestRecord:
        record = RequestRecord(due_s, request.output_len)
        record.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(self._path, request.body, record.on_body)
            response.raise_for_status()
            record.end()
        except RequestError as error:
            record.end(str(error))
        except TimeoutError:
            record.end(f"no complete response within {self._timeout_s:g} s")
        return record


async def _measure(
    workload: Workload, url: str, api_key: str | None, concurrency: int | None, num_warmup: int, timeout_s: float
) -> tuple[Workload, list[RequestRecord], float]:
    """Send all requests; return the workload with its model, the records, and the CPU seconds that this process used.

    The warm-up uses another seed, so that nothing of what is measured is in the server's cache.

    Raises:
        RequestError: the server cannot be reached, or a warm-up request fails.
    """
    async with HttpClient(url, api_key=api_key) as client:
        workload = replace(workload, model=await client.find_model(workload.model))
        planned = workload.plan()
        load = LoadGenerator(client, workload.endpoint, timeout_s)
        warmup = replace(workload, seed=workload.seed + 1, num_prompts=num_warmup)
        _raise_failures(await load.run_closed(warmup.plan(), 1))
        start_cpu_s = time.process_time()
        if concurrency is None:
            records = await load.run_open(planned)
        else:
            records = await load.run_closed(planned, concurrency)
        return workload, records, time.process_time() - start_cpu_s


def _raise_failures(records: Sequence[RequestRecord]) -> None:
    """Raise an error with the number of failed requests and the first few messages, if any failed."""
    errors = [record.error for record in records if record.error is not None]
    if errors:
        shown = "; ".join(dict.fromkeys(errors[:3]))
        raise RequestError(f"{len(errors)} of {len(records)} requests failed: {shown}")
