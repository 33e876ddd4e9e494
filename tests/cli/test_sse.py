"""Server-sent events, read in whatever pieces they come."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.client import EventReader

STREAM = (
    b': ping\n\ndata: {"a": 1}\n\ndata:first\r\ndata: second\r\n\r\n'
    b"event: x\nid: 7\ndata:  two spaces\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"first\nsecond", b" two spaces", b"[DONE]"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    assert [data for piece in pieces for data in reader.feed(piece)] == EVENTS


def test_an_event_that_never_ends_is_never_told() -> None:
    reader = EventReader()
    assert reader.feed(b"data: half\n") == []
    assert reader.feed(b"\n") == [b"half"]
