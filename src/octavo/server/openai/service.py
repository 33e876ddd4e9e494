"""`OpenAICompatibleService`: converts wire requests to engine requests and back."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from octavo._version import __version__
from octavo.engine.async_llm_engine import MANY_BAD_WORDS, AsyncLLMEngine
from octavo.errors import UserError
from octavo.server.args import ServerArgs
from octavo.server.http.errors import as_api_error, bad_request
from octavo.server.openai.answer_plan import AnswerFormats
from octavo.server.openai.answers import (
    AnswerT,
    ChatStream,
    CompletionKind,
    CompletionStream,
    CompletionT,
    prepare_chat,
    prepare_completion,
)
from octavo.server.openai.birth import Birth
from octavo.server.openai.chat_prompt import has_media, prompt_options, render_chat, token_ids_of
from octavo.server.openai.embeddings import (
    Embeddings,
    EmbeddingsRequest,
    embed,
    prepare_embeddings,
)
from octavo.server.openai.media import MediaReader
from octavo.server.openai.models import ModelAliases, ServedModel, ServedModels
from octavo.server.openai.params import Warn, is_constrained, truncated, wire_names
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from octavo.server.openai.replies import DetokenizeReply, TokenizeReply
from octavo.server.openai.reply_stream import ReplyHead
from octavo.server.openai.tools import shown_tools

T = TypeVar("T")

MANY_PROMPTS = 16  # from here on, they are prepared outside the event loop
_MAX_FETCHES = 32  # of images and videos from elsewhere, at once
_MAX_ID_CHARACTERS = 128


class OpenAICompatibleService:
    """Created once the engine is ready.

    `is_large` marks a body so long that processing it in the event loop would stall the streams. Before a method
    returns, it passes `warn` the parts of a request that have no effect. All methods raise ApiError; errors that occur
    while a stream runs are raised by its `take`.
    """

    def __init__(self, engine: AsyncLLMEngine, model_name: str, args: ServerArgs) -> None:
        aliases = ModelAliases(args.model_alias)
        self.models = ServedModels(engine, model_name, args.served_model_name, args.lora_root, aliases)
        self.front = engine.front
        self.args = args
        self._media_reader = MediaReader.of(args)
        # Of their own: threads that wait for other servers must not keep requests from being prepared.
        self._fetchers = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="fetch")
        self._fingerprint = f"octavo-{__version__}-{self.front.core.profile}"
        self.formats = AnswerFormats(
            self.front.tokenizer,
            tool_call_parser_name=args.tool_call_parser,
            reasoning_parser_name=args.reasoning_parser,
        )

    async def begin_chat(self, request: ChatCompletionRequest, warn: Warn, is_large: bool, birth: Birth) -> ChatStream:
        """Prepare the answer to a conversation, which has not started."""
        return await self.begin_answer(ChatStream, request, warn, is_large, birth)

    async def begin_answer(
        self, kind: type[AnswerT], request: ChatCompletionRequest, warn: Warn, is_large: bool, birth: Birth
    ) -> AnswerT:
        """Prepare the answer to a conversation, in the form of any API."""
        head, model = self._begin(request, kind.id_prefix, birth)
        media = await self.media(request.messages or ())
        prepare = partial(prepare_chat, kind, request, head, model, self.formats, media, birth, warn)
        return await prepared(prepare, request, is_large)

    async def begin_completion(
        self, request: CompletionRequest, warn: Warn, is_large: bool, birth: Birth
    ) -> CompletionStream:
        """Prepare the completion of one prompt or many, which has not started."""
        return await self.begin_continuation(CompletionStream, request, warn, is_large, birth)

    async def begin_continuation(
        self, kind: CompletionKind[CompletionT], request: CompletionRequest, warn: Warn, is_large: bool, birth: Birth
    ) -> CompletionT:
        """Prepare the completion of one prompt or many, in the form of any API."""
        head, model = self._begin(request, "cmpl-", birth)
        is_large = is_large or (isinstance(request.prompt, list) and len(request.prompt) > MANY_PROMPTS)
        prepare = partial(
            prepare_completion, kind, request, head, model, self.formats, self.args.max_prompts, birth, warn
        )
        return await prepared(prepare, request, is_large)

    async def embeddings(self, request: EmbeddingsRequest, warn: Warn, is_large: bool) -> Embeddings:
        """The vectors of one input or many."""
        model = self.models.find(request.model)
        is_large = is_large or request.num_inputs > MANY_PROMPTS
        prompts = await prepared(partial(prepare_embeddings, request, model), request, is_large)
        return await embed(request, prompts, model)

    async def tokenize(self, request: TokenizeRequest, warn: Warn, is_large: bool) -> TokenizeReply:
        self.models.find(request.model)
        media = await self.media(request.messages or ())
        return await prepared(lambda: self._tokenize(request, media, warn), request, is_large)

    def _tokenize(self, request: TokenizeRequest, media: MediaReader | None, warn: Warn) -> TokenizeReply:
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("Exactly one of 'prompt' and 'messages' is required.", "prompt")
        tokenizer, max_tokens = self.front.tokenizer, request.truncate_prompt_tokens
        if request.messages is not None:
            options, tags = prompt_options(request, shown_tools(request)), self.formats.reasoning
            prompt = render_chat(request, options, self.front, tags, media, warn)
            token_ids = token_ids_of(prompt)
        else:
            adds_special_tokens = request.add_special_tokens is not False
            token_ids = tokenizer.encode(request.prompt or "", add_special_tokens=adds_special_tokens)
            token_ids = truncated({"prompt_token_ids": token_ids}, max_tokens)["prompt_token_ids"]
        return TokenizeReply(
            count=len(token_ids),
            max_model_len=self.front.config.model.max_model_len,
            tokens=token_ids,
            token_strs=list(map(tokenizer.token_text, token_ids)) if request.return_token_strs else None,
        )

    async def detokenize(self, request: DetokenizeRequest, warn: Warn, is_large: bool) -> DetokenizeReply:
        self.models.find(request.model)
        return await prepared(lambda: self._detokenize(request.tokens), request, is_large)

    def _detokenize(self, token_ids: list[int]) -> DetokenizeReply:
        vocab_size = self.front.config.model.vocab_size
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                text = f"tokens[{index}]={token_id}: token ids of this model are 0 to {vocab_size - 1}"
                raise bad_request(text, f"tokens[{index}]")
        return DetokenizeReply(prompt=self.front.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _begin(self, request: GenerationRequest, prefix: str, birth: Birth) -> tuple[ReplyHead, ServedModel]:
        """Check what all requests have; return the leading fields of the reply, and the model."""
        if request.n is not None and request.n > self.args.max_n:
            raise bad_request(f"n={request.n}: at most {self.args.max_n}", "n")
        limit = self.args.max_temperature
        if request.temperature is not None and request.temperature > limit:
            text = f"temperature={request.temperature:g}: at most {limit:g} (the server's --max-temperature)"
            raise bad_request(text, "temperature")
        if request.request_id is not None and len(request.request_id) > _MAX_ID_CHARACTERS:
            raise bad_request(f"request_id: at most {_MAX_ID_CHARACTERS} characters", "request_id")
        if request.stream_options is not None and not request.stream:
            raise bad_request("'stream_options' needs 'stream': true.", "stream_options")
        model = self.models.find(request.model)
        head = ReplyHead(
            id=f"{prefix}{request.request_id or birth.name}",
            model=model.card.id,
            created=birth.created,
            system_fingerprint=self._fingerprint,
        )
        return head, model

    async def media(self, messages: Sequence[ChatMessage], root: str = "messages") -> MediaReader | None:
        """Return what reads the images and videos of messages, those from elsewhere fetched; None: it takes text only.

        `root` is the field of the request that has the messages.
        """
        if not self.front.inputs.takes_images:
            return None
        loop, reader = asyncio.get_running_loop(), self._media_reader
        try:
            parts = list(reader.remote_parts(messages, root))
            data = await asyncio.gather(*(loop.run_in_executor(self._fetchers, fetch) for _, fetch in parts))
        except UserError as error:
            raise as_api_error(error, {}) from error
        return replace(reader, fetched={path: one for (path, _), one in zip(parts, data, strict=True)})


async def prepared(work: Callable[[], T], request: object, is_large: bool) -> T:
    """Prepare a request: render, tokenize, validate. Slow work leaves the event loop."""
    is_slow = is_large or has_media(getattr(request, "messages", None))
    if isinstance(request, GenerationRequest):
        is_slow = is_slow or is_constrained(request) or len(request.bad_words or ()) > MANY_BAD_WORDS
    try:
        return await asyncio.to_thread(work) if is_slow else work()
    except UserError as error:
        names = wire_names(request) if isinstance(request, GenerationRequest) else {}
        raise as_api_error(error, names) from error


class Endpoint(NamedTuple):
    """What answers requests of one route: a method of the service, by name."""

    wire: type[GenerationRequest | EmbeddingsRequest]
    begin: str  # prepares the answer; where nothing is drawn for it, makes it


ENDPOINTS: Mapping[str, Endpoint] = MappingProxyType(
    {
        "/v1/chat/completions": Endpoint(ChatCompletionRequest, "begin_chat"),
        "/v1/completions": Endpoint(CompletionRequest, "begin_completion"),
        "/v1/embeddings": Endpoint(EmbeddingsRequest, "embeddings"),
    }
)
