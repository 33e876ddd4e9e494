"""Crowds: more clients at once, and more of them leaving, than the quick tests in `tests/hostile` have time for."""

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.breadth import pick
from tests.clients.conftest import SERVER_PYTHON
from tests.hostile.vitals import Vitals
from tests.hostile.wire import LONG, connect, post_bytes, read_answer, refusal
from tests.server.http_server import HttpServer

NUM_STREAMS = 512
NUM_TOKENS = pick(24, 64)  # of each
NUM_LEAVERS = pick(600, 2500)
NUM_FIRST_LEAVERS = pick(200, 500)
LEAVERS_AT_ONCE = 100
NUM_KV_BLOCKS = 4 * NUM_STREAMS  # just enough for all streams: all of their memory is touched early
FIRST_TOUCH_BYTES = 2**30  # of memory that is the server's from the start and comes into being when it is used


@pytest.fixture(scope="module")
def crowded() -> Iterator[HttpServer]:
    """A server for this file alone, with room for all of a crowd at once."""
    flags = ("--max-num-seqs", str(NUM_STREAMS), "--num-kv-blocks", str(NUM_KV_BLOCKS), "--no-access-log")
    with pytest.MonkeyPatch.context() as environment:
        # Where our own kernels are not built, oneDNN keeps code for each of the last 1,024 shapes: some 300 MB.
        environment.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
        running = HttpServer(*flags, python=SERVER_PYTHON)
    with running:
        yield running
        assert "Traceback" not in running.log


class Reader:
    """One stream."""

    def __init__(self) -> None:
        self.received = b""

    async def read(self, server: HttpServer, message: bytes, *, until: int = 10**9) -> None:
        """Read the answer to its end, or until so many bytes have come; then hang up."""
        parts = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(message)
            while len(self.received) < until and b"data: [DONE]" not in self.received:
                piece = await reader.read(65536)
                assert piece, self.received[-500:]
                self.received += piece
        finally:
            writer.transport.abort()

    @property
    def num_tokens(self) -> int:
        """What the stream's usage chunk says."""
        *_, last = (line for line in self.received.split(b"\n") if line.startswith(b"data: {"))
        return int(msgspec.json.decode(last.removeprefix(b"data: "))["usage"]["completion_tokens"])

    @property
    def has_error(self) -> bool:
        return b'"error"' in self.received or not self.received.startswith(b"HTTP/1.1 200")


def encoded(max_tokens: int) -> bytes:
    options = {"stream_options": {"include_usage": True}}
    return post_bytes(msgspec.json.encode({**LONG, **options, "max_tokens": max_tokens}))


async def test_512_streams_at_once_run_to_their_ends(crowded: HttpServer) -> None:
    """No error, every token; and beside the crowd, the server still answers who only asks how it is."""
    before = Vitals.of(crowded)
    readers = [Reader() for _ in range(NUM_STREAMS)]
    reading = asyncio.gather(*(reader.read(crowded, encoded(NUM_TOKENS)) for reader in readers))
    while not reading.done():
        health = await asyncio.to_thread(crowded.client.get, "/health")
        assert health.status_code == 200
        await asyncio.sleep(0.2)
    await reading
    assert not any(reader.has_error for reader in readers)
    assert {reader.num_tokens for reader in readers} == {NUM_TOKENS}
    before.wait_until_restored(crowded, FIRST_TOUCH_BYTES)


async def test_hundreds_leave_in_the_middle_and_nobody_else_notices(crowded: HttpServer) -> None:
    stayer, alone = Reader(), Reader()
    await alone.read(crowded, encoded(600))
    await come_and_leave(crowded, NUM_FIRST_LEAVERS)
    before = Vitals.of(crowded)
    staying = asyncio.create_task(stayer.read(crowded, encoded(600)))
    await come_and_leave(crowded, NUM_LEAVERS)
    await staying
    assert text_of(stayer) == text_of(alone)
    before.wait_until_restored(crowded)


async def come_and_leave(server: HttpServer, count: int) -> None:
    """Ask for the longest answer, and hang up anywhere between the first byte and twenty tokens, or later."""
    message = encoded(1500)
    for start in range(0, count, LEAVERS_AT_ONCE):
        sizes = [1 + 53 * n % 8000 for n in range(start, start + LEAVERS_AT_ONCE)]
        await asyncio.gather(*(Reader().read(server, message, until=size) for size in sizes))


def text_of(reader: Reader) -> str:
    chunks = [msgspec.json.decode(line[6:]) for line in reader.received.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_50_megabytes(crowded: HttpServer) -> None:
    before = Vitals.of(crowded)
    for _ in range(5):
        with connect(crowded) as connection:
            try:
                connection.sendall(post_bytes(b'{"messages": "' + b"x" * 50_000_000 + b'"}'))
            except (BrokenPipeError, ConnectionResetError):
                continue  # refused by its announced length, before it was read
            refusal(*read_answer(connection), 413)
    before.wait_until_restored(crowded)


def test_30_megabytes_of_numbers_are_read_beside_the_others(crowded: HttpServer) -> None:
    """Under the limit, and far too long: refused, while small requests go through."""
    with connect(crowded) as connection:
        connection.sendall(post_bytes(b'{"prompt": [' + b"1," * 14_000_000 + b"1]}", "/v1/completions"))
        assert crowded.client.get("/health").status_code == 200
        status, body = read_answer(connection)
    assert refusal(status, body, 400)["code"] == "context_length_exceeded"
