"""The life cycle of a server's engine: HTTP responds while it loads; it serves, and may die.

loading -> ready -> dead
loading -> failed
any of these -> unloaded -> loading, where a server has several models (`server/engine_pool.py`)
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Literal

import msgspec

from octavo._version import __version__
from octavo.async_llm import load_in_thread
from octavo.config.args import EngineArgs
from octavo.device.process import freeze_loaded_objects
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.output_processor import RequestObserver
from octavo.metrics.collect import EngineMetrics
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError, unavailable
from octavo.server.openai.service import OpenAICompatibleService

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 3.0  # how long /health still reports a dead engine
_OBJECTS_BETWEEN_LOOKS = 50_000
Status = Literal["unloaded", "loading", "ready", "failed", "dead"]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /server_info`. Secrets are left out of the settings."""

    version: str
    profile: str  # device, dtype and kernels: what the exact bits of an output depend on
    max_model_len: int
    kv_cache_tokens: int
    settings: dict[str, Any]


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /tokenizer_info`, for programs that render prompts themselves, such as lm-eval."""

    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class EngineLifecycle:
    """The one engine of a server, and its status."""

    def __init__(self, args: EngineArgs, server_args: ServerArgs) -> None:
        self._args, self._server_args = args, server_args
        self._engine: AsyncLLMEngine | None = None
        self._service: OpenAICompatibleService | None = None
        self.on_ready: Callable[[str], None] = logger.info  # called with a message when ready
        self.on_end: Callable[[], None] = lambda: None  # called when the server should stop
        self.observer: RequestObserver | None = None  # of the engine's requests
        self._stage = "starting"  # of loading
        self._started_s = time.monotonic()
        self._loading: Future[AsyncLLMEngine] = Future()
        self.status: Status = "loading"
        self.failure: BaseException | None = None  # why it failed or died

    def start_loading(self) -> None:
        """Start loading on a thread; no event loop is needed yet."""
        self.status, self._started_s, self._stage = "loading", time.monotonic(), "starting"
        self._loading = load_in_thread(self._args, partial(setattr, self, "_stage"), is_daemon=True)

    async def run(self) -> None:
        """Wait for the engine, serve with it until it dies, then call `on_end`."""
        try:
            self._engine = await asyncio.wrap_future(self._loading)
            self._engine.front.outputs.observer = self.observer
            service = OpenAICompatibleService(self._engine, self._args.model_name, self._server_args)
            await service.models.add_modules(self._server_args.lora_modules)
            if not self._server_args.allow_runtime_lora:  # else what an alias means may come later
                service.models.check_aliases()
            self._service = service
            self.status = "ready"
            # Streams create no cycles, and collecting garbage after every 700 objects cost 7 % of a token.
            freeze_loaded_objects()
            gc.set_threshold(_OBJECTS_BETWEEN_LOOKS, 20, 20)
            num_tokens, length = self.info.kv_cache_tokens, self.info.max_model_len
            waited_s = time.monotonic() - self._started_s
            capacity = f"{num_tokens:,} tokens, {num_tokens / length:.1f} requests of {length:,}"
            self.on_ready(f"{self.served_name} is ready after {waited_s:.1f} s; KV cache: {capacity}")
            self.failure = await self._engine.died()
            self.status = "dead"
            logger.error("the engine has ended: %s", self.failure)
            await asyncio.sleep(DEATH_NOTICE_S)
        except Exception as error:  # noqa: BLE001 - `serve` raises it again when all is closed
            self.status, self.failure = "failed", error
        self.on_end()

    async def close(self) -> None:
        """Shut down the engine. Running requests end with an error."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.exit)

    async def unload(self) -> None:
        """Shut down the engine; it may be loaded again."""
        self.status = "unloaded"
        await self.close()
        self._engine = self._service = self.failure = None
        gc.unfreeze()  # what is garbage now was frozen when it was ready
        gc.collect()

    def knows(self, name: str) -> bool:
        """Whether a name stands for the model or an adapter, as far as is known while there is an engine."""
        return self._service is not None and self._service.models.has(name)

    @property
    def service(self) -> OpenAICompatibleService:
        """The service that answers requests. Raises ApiError, 503, while there is none."""
        if (refusal := self.refusal()) is not None:
            raise refusal
        assert self._service is not None
        return self._service

    @asynccontextmanager
    async def serving(self, name: str | None) -> AsyncIterator[OpenAICompatibleService]:
        """Enter with the service that answers for a model, or says that it does not know it. Raises ApiError, 503."""
        yield self.service

    @property
    def max_running(self) -> int:
        """How many samples run at once, in all replicas."""
        num_seqs = min(self._args.max_num_seqs, self._args.max_num_batched_tokens)  # each gets a token of a step
        return num_seqs * self._args.data_parallel_size

    @property
    def engine(self) -> AsyncLLMEngine:
        """The engine. Raises ApiError, 503, while there is none."""
        if (refusal := self.refusal()) is not None:
            raise refusal
        assert self._engine is not None
        return self._engine

    @property
    def info(self) -> ServerInfo:
        """The settings in effect. Raises ApiError, 503, while there is no engine."""
        front = self.service.front
        return ServerInfo(
            version=__version__,
            profile=front.core.profile,
            max_model_len=front.config.model.max_model_len,
            kv_cache_tokens=front.core.kv_tokens,
            settings={
                spec.name: getattr(args, spec.name)
                for args in (self._args, self._server_args)
                for spec in fields(args)
                if not spec.metadata["is_secret"]
            },
        )

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """What renders and ends a prompt of this model. Raises ApiError, 503, while there is no engine."""
        front = self.service.front
        tokenizer, named = front.tokenizer, front.tokenizer.named_tokens
        return TokenizerInfo(
            vocab_size=tokenizer.vocab_size,
            model_max_length=front.config.model.max_model_len,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            pad_token=named.get("pad_token"),
            chat_template=None if tokenizer.chat_template is None else tokenizer.chat_template.source,
        )

    @property
    def served_name(self) -> str:
        """The model's main name on the wire."""
        return (*self._server_args.served_model_name, self._args.model_name)[0]

    @property
    def metrics(self) -> EngineMetrics | None:
        """The engine's metrics; None while it loads."""
        return None if self._service is None or self._engine is None else self._engine.metrics

    def refusal(self) -> ApiError | None:
        """Return the error for requests while there is no engine; None when it is ready."""
        match self.status:
            case "ready":
                return None
            case "loading":
                waited_s = time.monotonic() - self._started_s
                return unavailable(f"The model is being loaded: {self._stage}, {waited_s:.0f} s so far.", "loading")
            case "unloaded":
                return unavailable("The model is not loaded.", "unloaded")
            case _:
                return unavailable("The engine has ended.", "engine_dead")
