"""Workloads: the same seed gives the same requests, and they are what was asked for."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from octavo.cli.load_report import RequestRecord
from octavo.cli.load_test import Workload, parse_span
from octavo.errors import InvalidParameterError

SPEC = Workload(
    endpoint="completions", model="m", num_prompts=200, input_len="3:9", output_len="5", prefix_len=4,
    num_prefixes=2, token_ids="10:12", rate=50.0, temperature=0.0, seed=1,
)  # fmt: skip


def bodies(planned: list[RequestRecord]) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in planned]


def test_one_seed_one_workload() -> None:
    one, same, other = (
        [(request.send_at_s, request.body, request.output_len) for request in each.plan()]
        for each in (SPEC, SPEC, replace(SPEC, seed=2))
    )
    assert one == same
    assert one != other


def test_prompts_share_prefixes_in_turn() -> None:
    prompts = [body["prompt"] for body in bodies(SPEC.plan())]
    assert {len(prompt) for prompt in prompts} == set(range(7, 14))
    assert {token for prompt in prompts for token in prompt} == {10, 11, 12}
    for first, third in zip(prompts, prompts[2:], strict=False):
        assert first[:4] == third[:4]
    assert prompts[0][:4] != prompts[1][:4]


def test_lengths_are_asked_for_exactly() -> None:
    planned = SPEC.plan()
    for body, request in zip(bodies(planned), planned, strict=True):
        assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (5, 5, True)
        assert body["stream_options"] == {"include_usage": True}
        assert request.output_len == 5


def test_times_are_a_poisson_process_of_that_rate() -> None:
    times_s = [request.send_at_s for request in replace(SPEC, num_prompts=5000).plan()]
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert mean_s == pytest.approx(1 / 50, rel=0.05)
    assert sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s) == pytest.approx(mean_s**2, rel=0.15)


def test_without_a_rate_all_are_there_at_once() -> None:
    assert {request.send_at_s for request in replace(SPEC, rate=None).plan()} == {0.0}


def test_chat_sends_a_message_of_words() -> None:
    [message] = bodies(replace(SPEC, endpoint="chat").plan())[0]["messages"]
    assert message["role"] == "user"
    assert 7 <= len(message["content"].split()) <= 13


def test_spans() -> None:
    assert parse_span("x", "64", 1) == (64, 64)
    assert parse_span("x", "1:9", 1) == (1, 9)


@pytest.mark.parametrize("text", ["", "a", "0", "9:1", "1:", "1:2:3", "-4"])
def test_a_span_that_is_none(text: str) -> None:
    if text == "1:":
        assert parse_span("x", text, 1) == (1, 1)
        return
    with pytest.raises(InvalidParameterError, match="x="):
        parse_span("x", text, 1)
