"""The two kinds of model that `octavo chat` can talk to: in a local engine or on a server."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from octavo.cli.chat_text import ResponsePiece
from octavo.cli.options import AnswerOptions, EngineOptions
from octavo.errors import InvalidParameterError

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, object]]
ChatModel = Callable[[Messages], AsyncIterator[ResponsePiece]]


@asynccontextmanager
async def local_model(engine: EngineOptions, sampling: AnswerOptions) -> AsyncIterator[ChatModel]:
    """A model in a local engine."""
    from octavo import AsyncLLM

    async with AsyncLLM(**engine) as llm:
        params = llm.get_default_sampling_params().replace(**{"max_tokens": None, **sampling})
        yield lambda messages: stream_response(llm, params, messages)


async def stream_response(
    llm: "AsyncLLM", params: "SamplingParams", messages: Messages
) -> AsyncIterator[ResponsePiece]:
    """Yield what each output adds to the previous one."""
    num_shown = 0
    async for output in llm.chat_stream(messages, params):
        yield ResponsePiece(output.text[num_shown:])
        num_shown = len(output.text)


@asynccontextmanager
async def remote_model(
    url: str, api_key: str | None, engine: EngineOptions, sampling: AnswerOptions
) -> AsyncIterator[ChatModel]:
    """A model on a server, whose engine is already configured."""
    from octavo.cli.remote.chat import RemoteModel
    from octavo.cli.remote.http import HttpClient
    from octavo.cli.remote.wire import find_model

    for name in engine:
        if name != "model_name":
            raise InvalidParameterError(name, engine[name], "has no effect with --url: it is set on the server")
    async with HttpClient(url, api_key=api_key) as client:
        yield RemoteModel(client, await find_model(client, engine.get("model_name")), sampling).answer
