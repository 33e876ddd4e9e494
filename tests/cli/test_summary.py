"""Figures from records that a test made up, so that every one of them can be checked by hand."""

import pytest

from octavo.cli.client import Usage
from octavo.cli.load_report import RequestRecord, parse_targets, summarize
from octavo.errors import InvalidParameterError


def record(sent_s: float, arrivals_s: list[float], num_tokens: int, error: str | None = None) -> RequestRecord:
    made = RequestRecord(0.0, b"", output_len=3)
    made.planned_s = sent_s - 0.001
    made.sent_s = sent_s
    made.arrivals_s = arrivals_s
    made.ended_s = arrivals_s[-1] if arrivals_s else sent_s
    made.usage = Usage(prompt_tokens=10, completion_tokens=num_tokens)
    made.error = error
    return made


QUICK = record(100.0, [100.1, 100.2, 100.3], 3)
SLOW = record(100.0, [101.0, 102.0], 5)
FAILED = record(100.5, [], 0, error="no")


def test_figures() -> None:
    report = summarize([QUICK, SLOW, FAILED], {}, client_cpu_s=0.008)
    assert (report["num_requests"], report["num_failed"], report["num_short"]) == (3, 1, 1)
    assert (report["num_prompt_tokens"], report["num_output_tokens"]) == (20, 8)
    assert report["elapsed_s"] == pytest.approx(2.0)
    assert report["requests_per_s"] == pytest.approx(1.0)
    assert report["output_tokens_per_s"] == pytest.approx(4.0)
    assert report["total_tokens_per_s"] == pytest.approx(14.0)
    assert report["time_to_first_token_ms_mean"] == pytest.approx(550.0)
    assert report["inter_token_latency_ms_mean"] == pytest.approx(400.0)
    assert report["time_per_output_token_ms_mean"] == pytest.approx((100.0 + 250.0) / 2)
    assert report["end_to_end_ms_p50"] == pytest.approx(1150.0)
    assert report["send_delay_ms_p99"] == pytest.approx(1.0)
    assert report["client_cpu_us_per_token"] == pytest.approx(1000.0)
    assert "goodput_share" not in report


@pytest.mark.parametrize(
    ("promise", "kept"),
    [("ttft:500", 1), ("ttft:1001", 2), ("itl:99", 0), ("itl:101", 1), ("tpot:249", 1), ("e2e:2001,ttft:50", 0)],
)
def test_goodput_counts_requests_that_kept_every_promise(promise: str, kept: int) -> None:
    report = summarize([QUICK, SLOW, FAILED], parse_targets([promise]), client_cpu_s=0.0)
    assert report["goodput_requests_per_s"] == pytest.approx(kept / 2.0)
    assert report["goodput_share"] == pytest.approx(kept / 3)


def test_one_token_has_no_time_per_token_and_breaks_no_promise_about_it() -> None:
    report = summarize([record(0.0, [1.0], 1)], parse_targets(["tpot:1", "itl:1"]), client_cpu_s=0.0)
    assert "time_per_output_token_ms_mean" not in report
    assert report["goodput_share"] == 1.0


def test_when_all_failed_there_are_no_times() -> None:
    report = summarize([FAILED, record(101.0, [], 0, error="no")], {}, client_cpu_s=0.1)
    assert (report["num_failed"], report["requests_per_s"]) == (2, 0.0)
    assert "time_to_first_token_ms_mean" not in report


def test_promises_are_read_in_every_spelling() -> None:
    limits_ms = {"ttft": 500.0, "itl": 50.0, "e2e": 1e4}
    for texts in (["ttft:500", "itl:50", "e2e:10000"], ["ttft:500,itl:50 e2e:1e4"]):
        assert parse_targets(texts) == limits_ms


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:0", "ttft:-1", "latency:5", "ttft:nan"])
def test_a_promise_that_is_none(text: str) -> None:
    with pytest.raises(InvalidParameterError, match="goodput="):
        parse_targets([text])
