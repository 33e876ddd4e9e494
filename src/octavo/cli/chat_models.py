"""The two kinds of model that `octavo chat` can talk to: in a local engine or on a server."""

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo.cli.chat_text import ResponsePiece
from octavo.cli.options import AnswerOptions, EngineOptions
from octavo.errors import InvalidParameterError

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config.engine import EngineConfig
    from octavo.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, object]]
# llama.cpp's. Without any, small models answer from the whole vocabulary; the API keeps to what requests say.
TERMINAL_SAMPLING = MappingProxyType({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05})
ChatModel = Callable[[Messages], AsyncIterator[ResponsePiece]]


@asynccontextmanager
async def local_model(engine: EngineOptions, sampling: AnswerOptions) -> AsyncIterator[ChatModel]:
    """A model in a local engine."""
    from octavo import AsyncLLM

    async with AsyncLLM(**engine) as llm:
        engine_config = (await llm.engine()).front.config
        params = chat_params(llm.get_default_sampling_params(), engine_config, sampling)
        yield lambda messages: stream_response(llm, params, messages)


def chat_params(defaults: "SamplingParams", config: "EngineConfig", sampling: AnswerOptions) -> "SamplingParams":
    """Return the parameters of answers: what was given, else the checkpoint's, else those of chats in a terminal."""
    names_none = config.use_generation_config and not config.model.generation.names_sampling
    added = {name: value for name, value in TERMINAL_SAMPLING.items() if names_none and name not in sampling}
    if added and sampling.get("temperature") != 0:
        told = ", ".join(f"{name} {value}" for name, value in added.items())
        print(f"The model names no sampling parameters, so the chat starts from {told}.", file=sys.stderr)
    return defaults.replace(**{"max_tokens": None, **added, **sampling})


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
