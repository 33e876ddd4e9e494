"""What a client needs of the OpenAI API's answers, as msgspec structs. Other fields are ignored, none is required.

Source: OpenAI's published API description; `reasoning_content` and `reasoning` are what servers of open models add.
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
    """One sample's part of a chunk: `delta` of a chat, `text` of a completion."""

    delta: Delta = msgspec.field(default_factory=Delta)
    text: str = ""
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta
        return bool(self.text or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, in the server's words."""

    message: str = ""


class Chunk(msgspec.Struct, kw_only=True):
    """The data of one event. `error` stands alone, in streams that failed after their start."""

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
        RequestError: with the server's words where it reports an error; for data that is no chunk at all.
    """
    try:
        chunk = _chunks.decode(data)
    except msgspec.DecodeError as error:
        raise RequestError(f"the server sent an event that is not of this API: {error}") from error
    if chunk.error is not None:
        raise RequestError(chunk.error.message or "the server reports an error without words")
    return chunk


def check_status(response: Response) -> None:
    """Raise what the server has against a request, if anything.

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
    raise RequestError(f"HTTP {response.status}: {text}")


async def find_model(client: HttpClient, wanted: str | None) -> str:
    """Return the model to name in requests: the one that was asked for, else the server's only or first one.

    Raises:
        RequestError: when the server cannot be reached or refuses.
        InvalidParameterError: when it lists nothing.
    """
    if wanted is not None:
        return wanted  # a server may know it by a name that it does not list
    response = await client.get("/v1/models")
    check_status(response)
    try:
        names = [card.id for card in msgspec.json.decode(bytes(response.body), type=_ModelList).data]
    except msgspec.DecodeError as error:
        raise RequestError(f"/v1/models is not of this API: {error}") from error
    if not names:
        raise InvalidParameterError("model", None, "the server lists none: name one with --model")
    return names[0]
