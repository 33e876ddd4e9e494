"""Statistics of a run: throughput, percentiles, and goodput (requests within their latency targets)."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cli.load.recorder import RequestRecord
from octavo.cli.report import Report, percentile, spread
from octavo.errors import InvalidParameterError

LIMITS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets in milliseconds, by their name in LIMITS. `itl` is met if 99% of the gaps meet it."""

    limits_ms: dict[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Slo":
        """Parse `ttft:500`; several targets are separate arguments or separated by commas or spaces.

        Raises:
            InvalidParameterError: an unknown name, or a limit that is not a positive number.
        """
        limits_ms = {}
        for text in " ".join(texts).replace(",", " ").split():
            name, _, number = text.partition(":")
            try:
                limits_ms[name] = float(number)
            except ValueError:
                limits_ms[name] = 0.0
            if name not in LIMITS or not limits_ms[name] > 0:
                raise InvalidParameterError("goodput", text, f"must be like ttft:500 (ms); names: {', '.join(LIMITS)}")
        return cls(limits_ms)

    def is_kept_by(self, record: RequestRecord) -> bool:
        """Return whether a successful request met every target; targets without a value are met."""
        gaps_ms = record.gaps_ms
        figures = {
            "ttft": record.first_token_ms,
            "itl": percentile(gaps_ms, 99) if gaps_ms else None,
            "tpot": record.per_token_ms,
            "e2e": record.end_to_end_ms,
        }
        return all((figure := figures[name]) is None or figure <= limit for name, limit in self.limits_ms.items())


def summarize(records: Sequence[RequestRecord], slo: Slo, client_cpu_s: float) -> Report:
    """Return the statistics of a run. Latencies and throughput are of successful requests."""
    good = [record for record in records if record.error is None]
    elapsed_s = max(r.ended_s for r in records) - min(r.sent_s for r in records)
    num_tokens = sum(record.num_output_tokens for record in good)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in good)
    report: Report = {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "num_short": sum(record.num_output_tokens != record.output_len for record in good),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_tokens,
        "elapsed_s": elapsed_s,
        "requests_per_s": len(good) / elapsed_s,
        "output_tokens_per_s": num_tokens / elapsed_s,
        "total_tokens_per_s": (num_tokens + num_prompt_tokens) / elapsed_s,
        **_times(good),
        **spread("send_delay_ms", [(record.sent_s - record.planned_s) * 1e3 for record in records]),
    }
    if slo.limits_ms:
        num_kept = sum(slo.is_kept_by(record) for record in good)
        report |= {"goodput_requests_per_s": num_kept / elapsed_s, "goodput_share": num_kept / len(records)}
    if num_tokens:
        report["client_cpu_us_per_token"] = client_cpu_s * 1e6 / num_tokens
    return report


def _times(good: Sequence[RequestRecord]) -> Report:
    per_token_ms = [record.per_token_ms for record in good]
    return {
        **spread("time_to_first_token_ms", [record.first_token_ms for record in good]),
        **spread("inter_token_latency_ms", [gap for record in good for gap in record.gaps_ms]),
        **spread("time_per_output_token_ms", [ms for ms in per_token_ms if ms is not None]),
        **spread("end_to_end_ms", [record.end_to_end_ms for record in good]),
    }
