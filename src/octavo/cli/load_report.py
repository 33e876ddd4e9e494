"""What a load test measured: a record per request, statistics, JSON for programs and an SVG for people."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

import msgspec

from octavo.cli.client import EventReader, Usage
from octavo.cli.terminal import PERCENTILES, Report, percentile, spread
from octavo.errors import InvalidParameterError, RequestError

Targets = Mapping[str, float]  # in milliseconds, by latency
_TARGETS = ("ttft", "itl", "tpot", "e2e")  # itl is met if 99% of the gaps meet it
_WIDTH, _HEIGHT, _MARGIN = 300, 200, 44  # of one panel's axes, and the margin around them, in pixels


class RequestRecord:
    """One request, and its timestamps (`time.perf_counter`) as seen by the client.

    An arrival is a chunk of the stream with output. It may contain several tokens: a server under load merges what the
    client has not read yet.
    """

    def __init__(self, send_at_s: float, body: bytes, output_len: int) -> None:
        self.send_at_s, self.body = send_at_s, body  # from the start of the run
        self.output_len = output_len  # requested number of tokens
        self.planned_s = self.sent_s = 0.0  # when it was scheduled to be sent, and was
        self.ended_s = 0.0
        self.arrivals_s: list[float] = []
        self.usage, self.has_usage = Usage(), False
        self.error: str | None = None
        self._reader = EventReader()

    def on_body(self, piece: bytes) -> None:
        """Record an arrival. The clock is read first, so that parsing is not attributed to the server."""
        now_s = time.perf_counter()
        has_output = False
        try:
            for chunk in self._reader.read_chunks(piece):
                if chunk.usage is not None:
                    self.usage, self.has_usage = chunk.usage, True
                has_output = any(choice.has_output for choice in chunk.choices) or has_output
        except RequestError as error:
            self.error = self.error or str(error)
            return
        if has_output:
            self.arrivals_s.append(now_s)

    def end(self, error: str | None = None) -> None:
        """Finish the record; a success must have output and report its number of tokens."""
        self.ended_s = time.perf_counter()
        self.error = self.error or error
        if self.error is None and not self.has_usage:
            self.error = "the stream ended without a usage chunk"
        if self.error is None and not self.arrivals_s:
            self.error = "the stream contained no text"

    @property
    def first_token_ms(self) -> float:
        return (self.arrivals_s[0] - self.sent_s) * 1e3

    @property
    def end_to_end_ms(self) -> float:
        return (self.ended_s - self.sent_s) * 1e3

    @property
    def gaps_ms(self) -> Sequence[float]:
        """Times between consecutive arrivals."""
        return [(b - a) * 1e3 for a, b in pairwise(self.arrivals_s)]

    @property
    def per_token_ms(self) -> float | None:
        """Mean time per token after the first; None if there is no second token."""
        num_later = self.usage.completion_tokens - 1
        return (self.arrivals_s[-1] - self.arrivals_s[0]) * 1e3 / num_later if num_later > 0 else None

    def meets(self, targets_ms: Targets) -> bool:
        """Return whether a successful request met every target; targets without a value are met."""
        gap_ms = percentile(self.gaps_ms, 99) if self.gaps_ms else None
        figures = dict(zip(_TARGETS, (self.first_token_ms, gap_ms, self.per_token_ms, self.end_to_end_ms), strict=True))
        return all((figure := figures[name]) is None or figure <= limit for name, limit in targets_ms.items())


def parse_targets(texts: Sequence[str]) -> Targets:
    """Parse `ttft:500`; several targets are separate arguments or separated by commas or spaces.

    Raises InvalidParameterError: an unknown name, or a limit that is not a positive number.
    """
    targets_ms = {}
    for text in " ".join(texts).replace(",", " ").split():
        name, _, number = text.partition(":")
        try:
            targets_ms[name] = float(number)
        except ValueError:
            targets_ms[name] = 0.0
        if name not in _TARGETS or not targets_ms[name] > 0:
            raise InvalidParameterError("goodput", text, f"must be like ttft:500 (ms); names: {', '.join(_TARGETS)}")
    return targets_ms


def parse_ranks(text: str) -> tuple[float, ...]:
    """Parse `50,90,99.9`. Raises InvalidParameterError: a percentile that is not above 0 and at most 100."""
    ranks = []
    for word in text.replace(",", " ").split():
        try:
            rank = float(word)
        except ValueError:
            rank = 0.0
        if not 0.0 < rank <= 100.0:
            raise InvalidParameterError("percentiles", word, "must be above 0 and at most 100, such as 50,90,99")
        ranks.append(rank)
    if not ranks:
        raise InvalidParameterError("percentiles", text, "must name one, such as 50,90,99")
    return tuple(ranks)


def summarize(
    records: Sequence[RequestRecord],
    targets_ms: Targets,
    client_cpu_s: float,
    ranks: Sequence[float] = PERCENTILES,
) -> Report:
    """Return the statistics of a run: throughput, percentiles and goodput, the requests within their targets.

    Latencies and throughput are of successful requests.
    """
    good = [record for record in records if record.error is None]
    elapsed_s = max(r.ended_s for r in records) - min(r.sent_s for r in records)
    num_tokens = sum(record.usage.completion_tokens for record in good)
    num_prompt_tokens = sum(record.usage.prompt_tokens for record in good)
    per_token_ms = [record.per_token_ms for record in good]
    report: Report = {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "num_short": sum(record.usage.completion_tokens != record.output_len for record in good),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_tokens,
        "elapsed_s": elapsed_s,
        "requests_per_s": len(good) / elapsed_s,
        "output_tokens_per_s": num_tokens / elapsed_s,
        "total_tokens_per_s": (num_tokens + num_prompt_tokens) / elapsed_s,
        **spread("time_to_first_token_ms", [record.first_token_ms for record in good], ranks),
        **spread("inter_token_latency_ms", [gap for record in good for gap in record.gaps_ms], ranks),
        **spread("time_per_output_token_ms", [ms for ms in per_token_ms if ms is not None], ranks),
        **spread("end_to_end_ms", [record.end_to_end_ms for record in good], ranks),
        **spread("send_delay_ms", [(record.sent_s - record.planned_s) * 1e3 for record in records], ranks),
    }
    if targets_ms:
        num_kept = sum(record.meets(targets_ms) for record in good)
        report |= {"goodput_requests_per_s": num_kept / elapsed_s, "goodput_share": num_kept / len(records)}
    if num_tokens:
        report["client_cpu_us_per_token"] = client_cpu_s * 1e6 / num_tokens
    return report


def encode_run(model: str, records: Sequence[RequestRecord], report: Report) -> bytes:
    """Return the report and the timestamps of each request, in the order of sending, as JSON."""
    ordered = sorted(records, key=lambda record: record.sent_s)
    requests = [
        {
            "sent_s": round(record.sent_s - ordered[0].sent_s, 6),
            "num_prompt_tokens": record.usage.prompt_tokens,
            "num_output_tokens": record.usage.completion_tokens,
            "arrivals_ms": [round((arrival_s - record.sent_s) * 1e3, 3) for arrival_s in record.arrivals_s],
            "end_to_end_ms": round(record.end_to_end_ms, 3),
            "error": record.error,
        }
        for record in ordered
    ]
    return msgspec.json.format(msgspec.json.encode({"model": model, "report": report, "requests": requests}), indent=1)


def draw_run(model: str, records: Sequence[RequestRecord]) -> str:
    """Return an SVG with the empirical distribution of each kind of latency of successful requests."""
    good = [record for record in records if record.error is None]
    samples = {
        "time to first token, ms": [record.first_token_ms for record in good],
        "inter-token latency, ms": [gap for record in good for gap in record.gaps_ms],
        "end to end, ms": [record.end_to_end_ms for record in good],
    }
    panels = [
        f'<g transform="translate({_MARGIN + at * (_WIDTH + 2 * _MARGIN)} {2 * _MARGIN})">{_panel(name, values)}</g>'
        for at, (name, values) in enumerate(samples.items())
        if values
    ]
    width = max(len(panels), 1) * (_WIDTH + 2 * _MARGIN)
    height = _HEIGHT + 4 * _MARGIN
    title = escape(f"{model}, {len(records)} requests")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="{_MARGIN}" y="{_MARGIN / 2}" font-size="14">{title}</text>{"".join(panels)}</svg>\n'
    )


def _panel(name: str, values: Sequence[float]) -> str:
    """Return one panel. Its x axis ends 10% above the 99th percentile, so that outliers do not hide everything else."""
    end = percentile(values, 99) * 1.1 or 1.0

    def place(rank: float) -> tuple[float, float]:
        return min(percentile(values, rank) / end, 1.0) * _WIDTH, (1 - rank / 100) * _HEIGHT

    curve = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(100 * i / 199) for i in range(200)))
    marks = [
        f'<path d="M0 {y:.1f}H{x:.1f}" stroke="#999" stroke-dasharray="2 3"/>'
        f'<text x="{x + 4:.1f}" y="{y + 12:.1f}" font-size="10">p{rank} {percentile(values, rank):.4g}</text>'
        for rank, (x, y) in ((rank, place(rank)) for rank in (50, 90, 99))
    ]
    return (
        f'<text x="0" y="-12">{escape(name)}, n={len(values)}, max {max(values):.4g}</text>'
        f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="black"/>'
        f'<text x="-8" y="10" text-anchor="end">100%</text><text x="-8" y="{_HEIGHT}" text-anchor="end">0%</text>'
        f'<text x="0" y="{_HEIGHT + 16}">0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{end:.4g}</text>'
        f'<polyline points="{curve}" fill="none" stroke="#1f5fbf" stroke-width="1.5"/>{"".join(marks)}'
    )
