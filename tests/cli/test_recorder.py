"""What a record notes of a stream, event by event."""

import pytest
from tests.cli.scripted_server import event, said, tokens

from octavo.cli.load_report import RequestRecord


def recorded(*pieces: bytes) -> RequestRecord:
    record = RequestRecord(0.0, b"", output_len=3)
    for piece in pieces:
        record.on_body(piece)
    record.end()
    return record


def test_arrivals_are_pieces_that_brought_output() -> None:
    record = recorded(said("", role="assistant"), b": ping\n\n", said("a"), said("b") + said("c"), *tokens(0))
    assert len(record.arrivals_s) == 2
    assert len(record.gaps_ms) == 1
    assert record.arrivals_s == sorted(record.arrivals_s)
    assert record.error is None


def test_reasoning_and_tool_calls_are_output() -> None:
    call = event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]})
    assert len(recorded(said("", reasoning="hm"), call, *tokens(0)).arrivals_s) == 2


def test_usage_is_kept() -> None:
    record = recorded(*tokens(3, prompt_tokens=11))
    assert (record.usage.completion_tokens, record.usage.prompt_tokens) == (3, 11)
    assert len(record.arrivals_s) == 3


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([said("a")], "without a usage chunk"),
        ([*tokens(0)], "contained no text"),
        ([said("a"), event({"error": {"message": "engine trouble"}}), *tokens(0)], "engine trouble"),
        ([event(b"not json"), *tokens(1)], "invalid event"),
    ],
)
def test_a_stream_that_failed_says_why(pieces: list[bytes], complaint: str) -> None:
    error = recorded(*pieces).error
    assert error is not None
    assert complaint in error
