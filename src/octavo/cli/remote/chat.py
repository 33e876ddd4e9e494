"""A model on an OpenAI-compatible server, for `octavo chat`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from octavo.cli.chat_text import ResponsePiece
from octavo.cli.remote.connection import Response
from octavo.cli.remote.http import HttpClient
from octavo.cli.remote.sse import EventReader
from octavo.cli.remote.wire import DONE, check_status, read_chunk
from octavo.errors import RequestError

_encode = msgspec.json.Encoder().encode


class RemoteModel:
    """Chats over HTTP. `options` are further fields of the request."""

    def __init__(self, client: HttpClient, model: str, options: Mapping[str, object]) -> None:
        self._client = client
        self._fields = {"model": model, "stream": True, **options}

    async def answer(self, messages: Sequence[Mapping[str, object]]) -> AsyncIterator[ResponsePiece]:
        """Stream the response. Closing the generator early cancels the request on the server.

        Raises:
            RequestError: the server rejects the request, fails or cannot be reached.
        """
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        body = _encode({**self._fields, "messages": messages})
        request = asyncio.create_task(self._client.post("/v1/chat/completions", body, pieces.put_nowait))
        request.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            async for data in _events(pieces):
                for choice in read_chunk(data).choices:
                    delta = choice.delta
                    if thought := delta.reasoning_content or delta.reasoning:
                        yield ResponsePiece(thought, is_reasoning=True)
                    if delta.content:
                        yield ResponsePiece(delta.content)
            _check_end(await request)
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


async def _events(pieces: "asyncio.Queue[bytes | None]") -> AsyncIterator[bytes]:
    reader = EventReader()
    while (piece := await pieces.get()) is not None:
        for data in reader.feed(piece):
            if data != DONE:
                yield data


def _check_end(response: Response) -> None:
    check_status(response)
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        raise RequestError("the server did not stream its response")
