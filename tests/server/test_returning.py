"""Clients that come back, through a real server: what they missed of a stream, and the same answer for the same key."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.server.http_server import HttpServer, numbers
from tests.server.returning_client import (
    ANN,
    BOB,
    RawStream,
    back,
    event_id,
    key,
    texts,
    wait_for_idle,
    wait_until_it_runs,
    without_name,
)

LONG = {"prompt": "Octavo is", "max_tokens": 60, "ignore_eos": True, "stream": True, "seed": 7, "temperature": 1}
WHOLE = {"prompt": "Octavo is", "max_tokens": 60, "ignore_eos": True, "temperature": 1}  # without a seed


@pytest.fixture(scope="module")
def keeper() -> Iterator[HttpServer]:
    keys = ("--api-key", "ann", "--api-key", "bob")
    with HttpServer("--resume-s", "60", *keys, has_model=False, headers=ANN) as server:
        yield server


@pytest.mark.parametrize("n", [1, 3])
def test_a_dropped_stream_is_resumed_where_it_was(keeper: HttpServer, n: int) -> None:
    body = {**LONG, "n": n, "stream_options": {"include_usage": True}}
    undisturbed = RawStream(keeper, body).events()
    stream = RawStream(keeper, body)
    got = stream.events(7)
    stream.cut()
    for count in (4, 1):  # while it runs, by the same request; each time the connection is lost again
        stream = RawStream(keeper, body, headers=back(got[-1]))
        got += stream.events(count)
        stream.cut()
    wait_for_idle(keeper)
    path = "/v1/streams/" + event_id(got[-1]).partition(":")[0]
    rest = RawStream(keeper, None, method="GET", path=path, headers=back(got[-1]))  # as an EventSource does
    assert rest.response.headers["content-type"].startswith("text/event-stream")
    got += rest.events()
    assert without_name(got) == without_name(undisturbed)
    assert RawStream(keeper, None, method="GET", path=path).events() == got  # from the start
    assert RawStream(keeper, body, headers=back(got[-1])).status == 204  # there is no more


def test_what_cannot_be_resumed_is_a_clear_error(keeper: HttpServer) -> None:
    events = RawStream(keeper, {**LONG, "max_tokens": 3}).events()
    for sent, body, status, code in (
        ("cmpl-unknown:3", LONG, 404, "stream_not_found"),
        ("nonsense", LONG, 400, "invalid_value"),
        (event_id(events[0]).replace(":1", ":1.2.3"), {**LONG, "max_tokens": 3}, 400, "invalid_value"),
        (event_id(events[0]).replace(":1", ":99"), {**LONG, "max_tokens": 3}, 400, "invalid_value"),
        (event_id(events[0]), LONG, 422, "stream_mismatch"),
    ):
        answer = RawStream(keeper, body, headers={"Last-Event-ID": sent})
        assert (answer.status, answer.error_code) == (status, code)


def test_a_stream_of_too_many_choices_says_that_it_cannot_be_resumed(keeper: HttpServer) -> None:
    stream = RawStream(keeper, {**LONG, "max_tokens": 1, "n": 65})
    assert "more than 64 choices" in stream.response.headers["x-octavo-warnings"]
    events = stream.events()
    assert len(texts(events)) == 65
    assert all(event.startswith(b"data: ") for event in events)


def test_a_client_can_end_its_stream(keeper: HttpServer) -> None:
    stream = RawStream(keeper, {**LONG, "max_tokens": 1500})
    name, _, _ = event_id(stream.events(1)[0]).partition(":")
    path = f"/v1/streams/{name}"
    assert RawStream(keeper, None, method="DELETE", path=path).status == 204
    assert b"stream_ended" in b"".join(stream.events())
    assert RawStream(keeper, None, method="GET", path=path).error_code == "stream_not_found"
    wait_for_idle(keeper)


def test_a_key_gives_the_same_stream_from_the_start(keeper: HttpServer) -> None:
    body = {**LONG, "seed": None}
    stream = RawStream(keeper, body, headers=key("stream"))
    got = stream.events(5)
    running = RawStream(keeper, body, headers=key("stream"))  # while it runs
    got += stream.events()
    assert running.events() == got
    assert RawStream(keeper, body, headers=key("stream")).events() == got
    assert texts(RawStream(keeper, body).events()) != texts(got)  # another computation has another seed


def test_racing_posts_with_one_key_are_computed_once(keeper: HttpServer) -> None:
    before = numbers(keeper)["octavo_generation_tokens_total"]
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: RawStream(keeper, WHOLE, headers=key("race")).json(), range(4)))
    late = RawStream(keeper, WHOLE, headers=key("race")).json()
    assert replies == [late] * 4
    assert numbers(keeper)["octavo_generation_tokens_total"] - before == WHOLE["max_tokens"]


def test_a_key_belongs_to_one_request(keeper: HttpServer) -> None:
    RawStream(keeper, WHOLE, headers=key("mine")).json()
    other = RawStream(keeper, {**WHOLE, "max_tokens": 5}, headers=key("mine"))
    assert (other.status, other.error_code) == (422, "idempotency_key_reused")
    assert RawStream(keeper, WHOLE, headers=key("k" * 256)).status == 400


def test_a_request_that_fails_may_be_repeated_with_its_key(keeper: HttpServer) -> None:
    bad = {**WHOLE, "temperature": 100}
    assert RawStream(keeper, bad, headers=key("bad")).status == 400
    assert RawStream(keeper, WHOLE, headers=key("bad")).status == 200


def test_an_answer_outlives_the_client_that_asked_for_it(keeper: HttpServer) -> None:
    before = numbers(keeper)["octavo_generation_tokens_total"]
    RawStream(keeper, WHOLE, headers=key("gone"), before_answer=lambda: wait_until_it_runs(keeper))
    wait_for_idle(keeper)
    late = RawStream(keeper, WHOLE, headers=key("gone")).json()
    assert late["usage"]["completion_tokens"] == WHOLE["max_tokens"]
    assert numbers(keeper)["octavo_generation_tokens_total"] - before == WHOLE["max_tokens"]


def test_nobody_else_may_come_back(keeper: HttpServer) -> None:
    got = RawStream(keeper, LONG, headers=key("shared")).events()
    answer = RawStream(keeper, LONG, headers=BOB | back(got[0]))
    assert (answer.status, answer.error_code) == (404, "stream_not_found")
    assert RawStream(keeper, LONG, headers=back(got[0])).events() == got[1:]
    assert event_id(RawStream(keeper, LONG, headers=BOB | key("shared")).events()[0]) != event_id(got[0])


def test_streams_have_no_ids_unless_they_are_kept(server: HttpServer) -> None:
    events = RawStream(server, {**LONG, "max_tokens": 2}).events()
    assert all(event.startswith(b"data: ") for event in events)
    answer = RawStream(server, LONG, headers={"Last-Event-ID": "cmpl-x:1"})
    assert (answer.status, answer.error_code) == (404, "stream_not_found")
