"""OpenAI API responses as far as the client needs them. Other fields are ignored; all are optional.

Source: OpenAI's published API description; `reasoning_content` and `reasoning` are extensions for open models.
"""

import msgspec

from octavo.cli.remote.connection import Response
from octavo.cli.remote.http import HttpClient
from octavo.errors import InvalidParameterError, RequestError

DONE = b"[DONE]"


class Delta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a chat message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, kw_only=True):
    """One sample's part of a chunk: `delta` in chats, `text` in completions."""

    delta: Delta = msgspec.field(default_factory=Delta)
    text: str = ""
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta
        return bool(self.text or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ErrorDetail(msgspec.Struct, kw_only=True):
    """The server's error message."""

    message: str = ""


class Chunk(msgspec.Struct, kw_only=True):
    """The data of one event. `error` appears alone, in streams that failed after their start."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorDetail | None = None


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


_chunks = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """Return one event's data.

    Raises:
        RequestError: with the server's message if it reports an error; or the data is not a chunk.
    """
    try:
        chunk = _chunks.decode(data)
    except msgspec.DecodeError as error:
        raise RequestError(f"the server sent an invalid event: {error}") from error
    if chunk.error is not None:
        raise RequestError(chunk.error.message or "the server reported an error without a message")
    return chunk


def check_status(response: Response) -> None:
    """Raise an error if the response is one.

    Raises:
        RequestError: with status and message.
    """
    if response.is_ok:
        return
    try:
        detail = msgspec.json.decode(bytes(response.body), type=Chunk).error
    except msgspec.DecodeError:
        detail = None
    text = detail.message if detail else bytes(response.body[:200]).decode(errors="replace")
    hint = " Pass the server's key with --api-key." if response.status == 401 else ""
    raise RequestError(f"HTTP {response.status}: {text}{hint}")


async def find_model(client: HttpClient, wanted: str | None) -> str:
    """Return the model name for requests: the requested one, else the server's first.

    Raises:
        RequestError: the server cannot be reached or rejects the request.
        InvalidParameterError: the server lists no models.
    """
    if wanted is not None:
        return wanted  # a server may accept names that it does not list
    response = await client.get("/v1/models")
    check_status(response)
    try:
        names = [card.id for card in msgspec.json.decode(bytes(response.body), type=_ModelList).data]
    except msgspec.DecodeError as error:
        raise RequestError(f"invalid response from /v1/models: {error}") from error
    if not names:
        raise InvalidParameterError("model", None, "the server lists no models; use --model")
    return names[0]
