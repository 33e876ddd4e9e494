"""`octavo top`: what a server is doing, in the terminal, from its metrics: this machine's or any by its URL."""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.client import HttpClient
from octavo.config.option_types import POSITIVE
from octavo.errors import InvalidParameterError, RequestError
from octavo.metrics.scrape import Change, Scrape

if TYPE_CHECKING:
    from rich.table import Table

_BAR = 30  # characters
_LATENCIES = {
    "first token": "octavo_time_to_first_token_seconds",
    "between tokens": "octavo_inter_token_latency_seconds",
    "in the queue": "octavo_request_queue_seconds",
    "whole request": "octavo_request_duration_seconds",
}
_QUANTILES = (0.5, 0.9, 0.99)


def top(
    url: Annotated[str, typer.Option("--url", help="server URL", metavar="<str>")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="API key for the server", metavar="<str>", show_default=False)
    ] = None,
    interval: Annotated[float, typer.Option("--interval", help="seconds between two looks", metavar="<float>")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one look, and exit")] = False,
) -> None:
    """Watch a server: requests, tokens per second, KV cache, latencies. Ctrl-C ends it.

    Latencies are of what ended since the last look. Where the output is no terminal, one look is printed.
    """
    if not POSITIVE[1](interval):
        raise InvalidParameterError("interval", interval, POSITIVE[0])
    asyncio.run(_watch(url, api_key, interval, once=once or not sys.stdout.isatty()))


async def _watch(url: str, api_key: str | None, interval_s: float, *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    async with HttpClient(url, api_key=api_key) as client:
        before = await _scrape(client, url)
        if once:
            await asyncio.sleep(interval_s)
            console.print(screen(Change(before, await _scrape(client, url)), url))
            return
        with Live(screen(Change(before, before), url), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                after = await _scrape(client, url)
                live.update(screen(Change(before, after), url), refresh=True)
                before = after


async def _scrape(client: HttpClient, url: str) -> Scrape:
    """Raises RequestError: the server cannot be reached, refuses, or is not Octavo's."""
    response = await client.get("/metrics")
    response.raise_for_status()
    try:
        scrape = Scrape.of(response.body.decode(), time.time())
    except ValueError as error:
        raise RequestError(f"what {url} has at /metrics is not Prometheus text: {error}") from error
    if not scrape.has("octavo_build_info"):
        raise RequestError(f"{url} has no metrics of Octavo")
    return scrape


def screen(change: Change, url: str) -> "Table":
    """Return one look: a table with a line for each subject."""
    from rich.table import Table

    now = change.after
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    lines = {
        "server": _server(now, url),
        "requests": _requests(now),
        "tokens/s": f"{change.rate('octavo_generation_tokens_total'):,.0f} out, "
        f"{change.rate('octavo_prompt_tokens_total'):,.0f} in",
        "KV cache": _bar(now.total("octavo_kv_cache_usage")),
        "prefix cache": _share("octavo_prefix_cache_hits_total", "octavo_prefix_cache_queries_total", now),
        **{name: _latency(change, metric) for name, metric in _LATENCIES.items()},
        "finished": _counts(now.by("octavo_requests_finished_total", "reason")),
        "refused": _counts(now.by("octavo_requests_rejected_total", "cause")),
        "drafts": _share(
            "octavo_spec_decode_num_accepted_tokens_total", "octavo_spec_decode_num_draft_tokens_total", now
        ),
        "trouble": _counts(
            {
                "preemptions": now.total("octavo_preemptions_total"),
                "engine deaths": now.total("octavo_engine_deaths_total"),
                "clients left": now.total("octavo_client_aborts_total"),
            }
        ),
        "memory": f"{now.total('process_resident_memory_bytes') / 2**30:.2f} GiB in the server's process",
    }
    for replica in sorted(now.by("octavo_replica_requests_running", "replica")):
        running = now.by("octavo_replica_requests_running", "replica")[replica]
        usage = now.by("octavo_replica_kv_cache_usage", "replica").get(replica, 0.0)
        lines[f"replica {replica}"] = f"{running:.0f} running, {usage:.0%} of the KV cache"
    for name, text in lines.items():
        if text:
            table.add_row(name, text)
    return table


def _server(now: Scrape, url: str) -> str:
    model, version = now.label("model_name") or "(loading)", now.label("version")
    started_s = now.total("process_start_time_seconds")
    up = f", up {_duration(now.time_s - started_s)}" if started_s else ""
    return f"{model} at {url}, octavo {version}{up}"


def _requests(now: Scrape) -> str:
    held = _counts(now.by("octavo_requests_held", "reason"))
    running, waiting = now.total("octavo_requests_running"), now.total("octavo_requests_waiting")
    in_flight = now.total("octavo_http_requests_in_flight")
    return (
        f"{running:.0f} running, {waiting:.0f} waiting{f' (held: {held})' if held else ''}, {in_flight:.0f} over HTTP"
    )


def _bar(share: float) -> str:
    filled = round(max(0.0, min(1.0, share)) * _BAR)
    return f"{'█' * filled}{'░' * (_BAR - filled)} {share:.0%}"


def _share(part: str, whole: str, now: Scrape) -> str:
    total = now.total(whole)
    return f"{now.total(part) / total:.0%} of {total:,.0f} tokens" if total else ""


def _latency(change: Change, metric: str) -> str:
    found = {share: change.quantile(metric, share) for share in _QUANTILES}
    return ", ".join(f"p{share * 100:.0f} {_time(value)}" for share, value in found.items() if value is not None)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{seconds:.0f} s" if minutes < 1 else f"{minutes} min" if hours < 1 else f"{hours} h {minutes % 60} min"


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{count:,.0f} {name}" for name, count in counts.items() if count)
