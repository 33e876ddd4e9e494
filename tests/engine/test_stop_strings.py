"""The matcher against a naive reading of the whole text, whatever the pieces."""

import sys
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.stop_strings import StopStringMatcher

texts = st.text("ab<é", max_size=40)
stops = st.lists(st.text("ab<é", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Read character by character; stop at the first that completes a stop string."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end if include else end - len(candidate)], candidate
    return text, None


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(position, len(text)) for position in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def run(matcher: StopStringMatcher, deltas: Sequence[str]) -> tuple[str, str | None]:
    shown = ""
    for delta in deltas:
        more, found = matcher.push(delta)
        shown += more
        if found is not None:
            return shown, found
    return shown + matcher.flush(), None


@given(text=texts, stop=stops, include=st.booleans(), cuts=st.lists(st.integers(0, 40), max_size=10))
def test_any_pieces_give_the_naive_answer(text: str, stop: list[str], include: bool, cuts: list[int]) -> None:
    assert run(StopStringMatcher(stop, include), cut(text, cuts)) == reference(text, stop, include)


@given(text=texts, stop=stops)
def test_exactly_what_could_still_become_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    matcher = StopStringMatcher(stop, include_in_output=False)
    shown = ""
    for position, character in enumerate(text, start=1):
        more, found = matcher.push(character)
        shown += more
        if found is not None:
            return
        seen = text[:position]
        prefixes = {candidate[:size] for candidate in stop for size in range(len(candidate))}
        assert len(seen) - len(shown) == max(len(prefix) for prefix in prefixes if seen.endswith(prefix))


@pytest.mark.parametrize(
    ("text", "stop", "shown", "found"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("xabcd", ["abcd", "bc"], "xa", "bc"),  # complete first, though it begins later
        ("xabc", ["c", "abc", "bc"], "x", "abc"),  # complete together: the longest
        ("stop", ["stop"], "", "stop"),
        ("sto", ["stop"], "sto", None),
        ("aaab", ["aab"], "a", "aab"),
    ],
)
def test_which_match_wins(text: str, stop: list[str], shown: str, found: str | None) -> None:
    assert run(StopStringMatcher(stop, include_in_output=False), list(text)) == (shown, found)
    assert run(StopStringMatcher(stop, include_in_output=False), [text]) == (shown, found)


def test_nothing_is_held_back_when_the_stop_string_is_shown() -> None:
    matcher = StopStringMatcher(["stop"], include_in_output=True)
    assert matcher.push("a sto") == ("a sto", None)
    assert matcher.push("p here") == ("p", "stop")


def test_no_stop_strings_hold_nothing_back() -> None:
    matcher = StopStringMatcher([], include_in_output=False)
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_work_and_memory_are_linear_in_the_length_of_a_stop_string() -> None:
    """What it takes is counted, in lines run and bytes held."""

    def cost(size: int) -> tuple[int, int]:
        lines = 0

        def count(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        tracemalloc.start()
        before = sys.gettrace()
        sys.settrace(count)
        try:
            matcher = StopStringMatcher(["ab" * size + "c"], include_in_output=False)
            for _ in range(size):
                matcher.push("abab")
        finally:
            sys.settrace(before)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return lines, held

    (few, small), (many, large) = cost(200), cost(800)
    assert many < 5 * few
    assert large < 6 * small


def test_samples_share_strings_but_no_text() -> None:
    first = StopStringMatcher(["stop"], include_in_output=False)
    assert first.push("sto") == ("", None)
    second = first.for_another()
    assert second.push("p") == ("p", None)
    assert first.push("p") == ("", "stop")
