"""`octavo bench serve`: load-tests any server with the OpenAI API, from the client's point of view.

An open loop (`--rate`, or all at once) simulates users who do not wait for each other; a closed loop (`--concurrency`)
a fixed number of users who do.
"""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from octavo.cli.report import print_reports
from octavo.errors import InvalidParameterError


def serve(
    url: Annotated[str, typer.Option("--url", help="server URL", metavar="<url>")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="model name; default: the server's first")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key for the server", metavar="<str>")] = None,
    endpoint: Annotated[
        Literal["completions", "chat"],
        typer.Option("--endpoint", help="completions (random token ids) or chat (random words)"),
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
    from octavo.cli.load.run import RunSpec, measure, raise_failures
    from octavo.cli.load.save import draw_run, encode_run
    from octavo.cli.load.summary import Slo, summarize
    from octavo.cli.load.workload import Span, WorkloadSpec

    slo = Slo.parse(goodput or [])
    _check(rate, concurrency, timeout, [file for file in (output, plot) if file is not None])
    workload = WorkloadSpec(
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
    run = RunSpec(
        url=url, api_key=api_key, workload=workload, concurrency=concurrency, num_warmup=warmup, timeout_s=timeout
    )
    with _runner() as runner:
        measured = runner.run(measure(run))
    report = summarize(measured.records, slo, measured.cpu_s)
    if output is not None:
        output.write_bytes(encode_run(measured, report))
        print(f"octavo: the run is in {output}", file=sys.stderr)
    if plot is not None:
        plot.write_text(draw_run(measured), encoding="utf-8")
        print(f"octavo: the plot of latencies is in {plot}", file=sys.stderr)
    print_reports([report], as_json=json)
    raise_failures(measured.records)


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
