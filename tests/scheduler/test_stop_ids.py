"""The cheap pre-check of sampled tokens, and the final decision."""

import numpy as np
import pytest

from octavo.contracts.engine import EngineCoreRequest
from octavo.scheduler.request import Request, StopIdTable
from octavo.testing import make_request


@pytest.mark.parametrize("stop_id", [0, 1022, 1023, 1024, 151_645])
def test_the_table_finds_exactly_the_stop_ids(stop_id: int) -> None:
    """Whatever its size: ids around the initial size, and ids that were never heard of and lie beyond."""
    table = StopIdTable()
    table.add_ids([stop_id, 5])
    probes = np.array([stop_id, 5, 6, stop_id + 1, stop_id + 4096, 2**31 - 1], dtype=np.int32)
    assert table.candidates(probes).tolist() == [True, True, False, False, False, False]


def test_the_table_has_no_answer_for_nothing() -> None:
    assert StopIdTable().candidates(np.zeros(0, dtype=np.int32)).tolist() == []


def verdict(message: EngineCoreRequest, token_id: int, num_output_tokens: int) -> tuple[str, int | None] | None:
    request = Request(message, 0, 100)
    report = request.check_stop(token_id, request.num_prompt_tokens + num_output_tokens)
    return None if report is None else (report.finish_reason, report.stop_token_id)


def test_an_end_token_stops_and_is_not_named() -> None:
    request = make_request("r", [1, 2], eos_token_ids=[9], max_tokens=10)
    assert verdict(request, 9, 1) == ("stop", None)
    assert verdict(request, 8, 1) is None


def test_a_stop_token_of_the_request_is_named() -> None:
    request = make_request("r", [1, 2], eos_token_ids=[9], stop_token_ids=[7], max_tokens=10)
    assert verdict(request, 7, 1) == ("stop", 7)


def test_ignore_eos_leaves_the_requests_own_stop_tokens() -> None:
    request = make_request("r", [1], eos_token_ids=[9, 7], stop_token_ids=[7], ignore_eos=True, max_tokens=10)
    assert verdict(request, 9, 1) is None
    assert verdict(request, 7, 1) == ("stop", 7)


def test_nothing_stops_before_min_tokens_are_out() -> None:
    request = make_request("r", [1], eos_token_ids=[9], min_tokens=3, max_tokens=10)
    assert [verdict(request, 9, count) for count in (1, 2, 3, 4)] == [None, None, None, ("stop", None)]


def test_a_stop_token_wins_over_the_length_cap() -> None:
    request = make_request("r", [1], eos_token_ids=[9], max_tokens=2)
    assert verdict(request, 9, 2) == ("stop", None)
    assert verdict(request, 8, 2) == ("length", None)
    assert verdict(request, 8, 1) is None


def test_without_max_tokens_the_context_is_the_cap() -> None:
    request = make_request("r", [1], max_tokens=None)
    assert verdict(request, 8, 98) is None
    assert verdict(request, 8, 99) == ("length", None)
