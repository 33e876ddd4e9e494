"""Saves a run: JSON for programs, an SVG for people."""

import msgspec

from octavo.cli.load.plot import draw_cdfs
from octavo.cli.load.recorder import RequestRecord
from octavo.cli.load.run import MeasuredRun
from octavo.cli.report import Report


def encode_run(run: MeasuredRun, report: Report) -> bytes:
    """Return the report and the timestamps of each request, in the order of sending, as JSON."""
    records = sorted(run.records, key=lambda record: record.sent_s)
    requests = [_times(record, records[0].sent_s) for record in records]
    whole = {"model": run.model, "report": report, "requests": requests}
    return msgspec.json.format(msgspec.json.encode(whole), indent=1)


def _times(record: RequestRecord, start_s: float) -> dict[str, object]:
    return {
        "sent_s": round(record.sent_s - start_s, 6),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "arrivals_ms": [round((arrival_s - record.sent_s) * 1e3, 3) for arrival_s in record.arrivals_s],
        "end_to_end_ms": round(record.end_to_end_ms, 3),
        "error": record.error,
    }


def draw_run(run: MeasuredRun) -> str:
    """Return the latency distributions of successful requests as an SVG."""
    good = [record for record in run.records if record.error is None]
    samples = {
        "time to first token, ms": [record.first_token_ms for record in good],
        "inter-token latency, ms": [gap for record in good for gap in record.gaps_ms],
        "end to end, ms": [record.end_to_end_ms for record in good],
    }
    return draw_cdfs(f"{run.model}, {len(run.records)} requests", samples)
