"""What is kept of answers without an engine: ids, memory, time, and readers that come and go."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from starlette.types import Message, Scope

from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.http.errors import DONE, ApiError
from octavo.server.http.exchange import Exchange
from octavo.server.kept.recording import Reader, Recording, parse_event_id
from octavo.server.kept.returning import Returning
from octavo.server.openai.birth import Birth
from octavo.server.openai.reply_stream import ReplyFacts


def chunk(choice: int, text: str) -> bytes:
    return b'data: {"choices":[{"index":%d,"text":"%s"}]}\n\n' % (choice, text.encode())


TIME_S = 0.3  # a busy machine may well stop for a tenth of it


class Script:
    """A reply that gives what a test puts into it."""

    is_by_token = False
    token_ids: ClassVar[list[list[int]]] = []

    def __init__(self, num_choices: int = 1) -> None:
        self.facts = ReplyFacts(name="cmpl-1", num_choices=num_choices, seeds=[1], model_key="m")
        self.is_over = self.is_closed = False
        self._frames: list[bytes] = []

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def put(self, *frames: bytes, is_last: bool = False) -> None:
        self._frames += frames
        self._is_ending = is_last
        self._notify()

    def take(self) -> bytes:
        self.is_over = self._is_ending
        taken, self._frames = b"".join(self._frames), []
        return taken

    async def whole(self) -> Any:
        raise NotImplementedError

    def count_tokens(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self.is_closed = True


def recorded(script: Script, sizes: list[int] | None = None) -> Recording:
    recording = Recording(([] if sizes is None else sizes).append)
    recording.name = script.facts.name
    recording.start(script, script.facts.num_choices)
    recording.show()
    return recording


def read(recording: Recording, counts: list[int] | None = None) -> list[bytes]:
    reader = Reader(recording, counts)
    return [event + b"\n\n" for event in reader.take().split(b"\n\n")[:-1]]


def test_an_id_says_what_its_reader_has_of_each_choice() -> None:
    script = Script(num_choices=2)
    recording = recorded(script)
    frames = [chunk(0, "a"), chunk(1, "b"), chunk(0, "c"), b'data: {"choices":[],"usage":1}\n\n', DONE]
    script.put(*frames, is_last=True)
    events = read(recording)
    ids = [event.partition(b"\n")[0] for event in events]
    assert ids == [b"id: cmpl-1:" + end for end in (b"1.0", b"1.1", b"2.1", b"2.1.1", b"2.1.2")]
    for number, event in enumerate(events, start=1):
        name, counts = parse_event_id(event.partition(b"\n")[0].removeprefix(b"id: ").decode())
        assert name == "cmpl-1"
        assert read(recording, counts) == events[number:]
        assert recording.has_all(counts) == (event is events[-1])


def test_choices_that_take_other_turns_are_continued_all_the_same() -> None:
    """As after a restart: each choice goes on where its reader is, whatever came of the other ones meanwhile."""
    script = Script(num_choices=2)
    recording = recorded(script)
    script.put(chunk(1, "x"), chunk(1, "y"), chunk(1, "z"), chunk(0, "a"), chunk(0, "b"))
    assert read(recording, [1, 2]) == [b"id: cmpl-1:1.3\n" + chunk(1, "z"), b"id: cmpl-1:2.3\n" + chunk(0, "b")]


def test_a_reader_ahead_of_the_recording_waits() -> None:
    script = Script()
    recording, notified = recorded(script), asyncio.Event()
    reader = Reader(recording, [2])
    reader.start(notified.set)
    script.put(chunk(0, "a"), chunk(0, "b"))
    assert reader.take() == b""
    script.put(chunk(0, "c"), is_last=True)
    assert notified.is_set()
    assert reader.take() == b"id: cmpl-1:3\n" + chunk(0, "c")
    assert reader.is_over


def test_an_evicted_recording_keeps_what_its_readers_have_not_read() -> None:
    script, sizes = Script(), list[int]()
    recording = recorded(script, sizes)
    reader = Reader(recording)
    reader.start(lambda: None)
    script.put(chunk(0, "a"))
    recording.evict()
    script.put(chunk(0, "b"))
    assert len(sizes) == 1  # what comes later is not kept
    assert reader.take() == b"id: cmpl-1:1\n" + chunk(0, "a") + b"id: cmpl-1:2\n" + chunk(0, "b")
    script.put(chunk(0, "c"))
    assert reader.take() == b"id: cmpl-1:3\n" + chunk(0, "c")
    with pytest.raises(ApiError, match="not kept"):
        Reader(recording).start(lambda: None)
    assert recording.num_bytes < 300


class Client:
    """One client of a kept answer."""

    def __init__(self, returning: Returning, script: Script, body: bytes = b"{}", **headers: str) -> None:
        self.sent: list[Message] = []
        self.has_left = asyncio.Event()
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope: Scope = {"type": "http", "path": "/v1/completions", "headers": named}
        exchange = Exchange(scope, self._receive, self._send, "id")
        exchange.body = body
        self.exchange = exchange

        async def begin(birth: Birth) -> Script:
            return script

        response = returning.respond(exchange, True, begin)
        assert response is not None
        self.task = asyncio.ensure_future(response(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_stream_goes_on_without_its_client_for_a_time() -> None:
    returning, script = Returning(ServerArgs(resume_s=TIME_S), HttpMetrics()), Script()
    first = Client(returning, script)
    await settle()
    script.put(chunk(0, "a"))
    first.has_left.set()
    await settle()
    second = Client(returning, script, last_event_id="cmpl-1:1")
    await asyncio.sleep(2 * TIME_S)
    assert not first.task.done()  # somebody reads
    second.has_left.set()
    await first.task
    assert script.is_closed
    with pytest.raises(ApiError, match="not kept"):
        Client(returning, script, last_event_id="cmpl-1:1")
    assert returning.metrics.num_kept_bytes == 0


async def test_an_answer_is_kept_for_a_time_when_it_is_over() -> None:
    returning, script = Returning(ServerArgs(resume_s=TIME_S), HttpMetrics()), Script()
    first = Client(returning, script)
    await settle()
    script.put(chunk(0, "a"), DONE, is_last=True)
    await first.task
    second = Client(returning, script, last_event_id="cmpl-1:1")
    await second.task
    assert first.body == b"id: cmpl-1:1\n" + chunk(0, "a") + second.body
    assert returning.metrics.num_kept_bytes > 0
    await asyncio.sleep(2 * TIME_S)
    assert returning.metrics.num_kept_bytes == 0
    with pytest.raises(ApiError, match="not kept"):
        Client(returning, script, last_event_id="cmpl-1:1")


async def test_memory_is_bounded_and_the_oldest_answers_go_first() -> None:
    returning, big = Returning(ServerArgs(idempotency_s=60.0, keep_mib=1), HttpMetrics()), chunk(0, "x" * 400_000)
    scripts = [Script() for _ in range(3)]
    for number, script in enumerate(scripts):
        client = Client(returning, script, idempotency_key=f"key {number}")
        await settle()
        script.put(big, is_last=True)
        await client.task
        assert client.body == big
    assert returning.metrics.num_kept_bytes < 2**20
    assert Client(returning, Script(), idempotency_key="key 0").exchange.num_samples == 1  # computed again
    kept = Client(returning, Script(), idempotency_key="key 2")
    await kept.task
    assert kept.body == big


async def test_a_key_whose_answer_outgrows_the_memory_is_not_computed_twice() -> None:
    returning, script = Returning(ServerArgs(keep_mib=1), HttpMetrics()), Script()
    first = Client(returning, script, idempotency_key="k")
    await settle()
    script.put(chunk(0, "x" * 2**20))
    with pytest.raises(ApiError) as refusal:
        Client(returning, script, idempotency_key="k")
    assert (refusal.value.status, refusal.value.detail.code) == (409, "answer_not_kept")
    script.put(DONE, is_last=True)
    await first.task
    assert first.body.endswith(DONE)


async def test_readers_learn_why_an_answer_ended() -> None:
    returning, script = Returning(ServerArgs(resume_s=60.0), HttpMetrics()), Script()
    first = Client(returning, script)
    await settle()
    script.put(chunk(0, "a"))
    second = Client(returning, script, last_event_id="cmpl-1:0")
    late = Client(returning, script, last_event_id="cmpl-1:1")
    await settle()
    first.task.cancel()
    await second.task
    assert second.body.startswith(
        b"id: cmpl-1:1\n" + chunk(0, "a") + b'data: {"error":{"message":"The request was aborted."'
    )
    with pytest.raises(ApiError, match="aborted"):  # nothing was sent, so it is the response
        await late.task
