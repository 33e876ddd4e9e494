"""`AsyncLLM`: one model serving many concurrent asyncio tasks."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, overload

from octavo.config.args import EngineArgs, for_streaming
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.decisions import decisions_about
from octavo.engine.front import ModelName, engine_args, one_per_prompt
from octavo.engine.ranking import PairScoring
from octavo.inputs import ChatMessage, Prompt, as_prompt_list
from octavo.lora_request import LoRARequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import PoolingParams, RequestPriority, SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class AsyncLLM:
    """A language model for asyncio programs. The core runs in a separate process, so it never blocks the event loop.

        async with AsyncLLM("Qwen/Qwen3-0.6B") as llm:
            result = await llm.generate("Hello, world!")
            async for output in llm.stream("Tell me more"):
                print(output.text)

    The model is loaded on entering the block, or on the first request. The keyword options are those of
    `octavo.config.args.EngineArgs`; `engine_process=False` runs the core on a thread of this process.
    One event loop uses it at a time; another may follow, as with several calls of `asyncio.run`.

    Raises UserError: a misspelled or invalid option. Errors about the model are raised when it is loaded.
    EventLoopError: by requests made while another event loop, still open, uses the engine.
    """

    def __init__(self, model_name: ModelName | None = None, **options: Any) -> None:
        if options.get("engine_process") is None:
            options["engine_process"] = True
        self._args = engine_args(model_name, for_streaming(options))
        self._loading: Future[AsyncLLMEngine] | None = None

    async def engine(self) -> AsyncLLMEngine:
        """Return the engine; load the model first if necessary.

        The load belongs to no task and no event loop: a task that stops waiting for it takes it from nobody else.
        """
        loading = self._loading
        if loading is None or (loading.done() and loading.exception() is not None):  # the next caller tries again
            loading = self._loading = load_in_thread(self._args)
        return loading.result() if loading.done() else await asyncio.wrap_future(loading)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises RuntimeError if the model is not loaded yet."""
        return self._loaded().front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of requests. Raises RuntimeError if the model is not loaded yet."""
        return self._loaded().front.inputs.default_params

    @overload
    async def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput: ...
    @overload
    async def generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]: ...
    async def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Complete one prompt (returns one output) or a list of prompts (returns a list, in order)."""
        outputs = await (await self.engine()).generate_async(prompts, sampling_params, priority, lora_request)
        return outputs[0] if isinstance(prompts, (str, Mapping)) else outputs

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = RequestPriority.NORMAL,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far whenever there are new tokens. Closing the generator early aborts the request."""
        engine = await self.engine()
        stream = engine.stream(
            prompt, sampling_params, request_id=request_id, priority=priority, lora_request=lora_request
        )
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Reply to one conversation. Without `sampling_params`, `max_tokens` is the rest of the context."""
        engine = await self.engine()
        prompt = await engine.chat_prompt(messages, **template_options)
        return (await engine.generate_async([prompt], _chat_params(engine, sampling_params), priority, lora_request))[0]

    async def generate_multimodal(
        self,
        requests: Sequence[Mapping[str, object]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        processor: Any = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for requests with images, in the order of the requests; `LLM.generate_multimodal` describes them."""
        engine = await self.engine()
        prompts = await engine.multimodal_prompts(requests, processor)
        return await engine.generate_async(prompts, sampling_params, priority, lora_request)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Return one output per prompt, with its `embedding`; `LLM.embed` describes it."""
        engine, prompt_list = await self.engine(), as_prompt_list(prompts)
        given = one_per_prompt(pooling_params, PoolingParams, len(prompt_list), "pooling_params")
        return await engine.generate_async(
            prompt_list, [params or PoolingParams() for params in given], priority, lora_request
        )

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        priority: int = RequestPriority.NORMAL,
        *,
        instruction: str | None = None,
    ) -> list[float]:
        """Return how well documents fit one query, or each its own; `LLM.score` describes it."""
        engine = await self.engine()
        first, second = ([texts] if isinstance(texts, str) else texts for texts in (queries, documents))
        scoring = await asyncio.to_thread(PairScoring, engine.front, first, second, instruction)
        return scoring.scores(await engine.generate_async(scoring.prompts, scoring.params, priority))

    async def decide(
        self,
        state: object,
        questions: Mapping[str, Mapping[str, object]],
        priority: int = RequestPriority.NORMAL,
        *,
        images: Mapping[str, object] | None = None,
    ) -> dict[str, dict[str, object]]:
        """Answer typed questions about a state by probabilities; `LLM.decide` describes them."""
        engine = await self.engine()
        decisions = await asyncio.to_thread(decisions_about, engine.front, state, questions, images)
        answers = decisions.answers(await engine.generate_async(decisions.prompts, decisions.params, priority))
        return {answer.question.name: answer.as_dict for answer in answers}

    async def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        priority: int = RequestPriority.NORMAL,
        *,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the reply to one conversation."""
        engine = await self.engine()
        prompt = await engine.chat_prompt(messages, **template_options)
        params = _chat_params(engine, sampling_params)
        stream = engine.stream(prompt, params, priority=priority, lora_request=lora_request)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its waiter gets the output so far, with finish_reason `abort`."""
        await (await self.engine()).abort_request(request_id)

    async def exit(self) -> None:
        """Release the model and its memory. Idempotent."""
        if self._loading is None:
            return
        loaded = asyncio.wrap_future(self._loading)
        await asyncio.wait([loaded])
        if loaded.exception() is None:  # otherwise those who wanted the engine were told
            await asyncio.to_thread(loaded.result().exit)

    def _loaded(self) -> AsyncLLMEngine:
        if self._loading is None or not self._loading.done() or self._loading.exception() is not None:
            raise RuntimeError("the model is not loaded yet: use `async with`, or await a request first")
        return self._loading.result()

    async def __aenter__(self) -> Self:
        await self.engine()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.exit()


def load_in_thread(
    args: EngineArgs, on_stage: Callable[[str], None] = logger.debug, *, is_daemon: bool = False
) -> Future[AsyncLLMEngine]:
    """Load an engine in a thread; no event loop is needed yet. `on_stage` as in `EngineFront`."""
    loading: Future[AsyncLLMEngine] = Future()
    loading.set_running_or_notify_cancel()  # from here on, cancelling one who waits does not cancel the load

    def run() -> None:
        try:
            engine = AsyncLLMEngine.from_args(args, on_stage)
        except BaseException as error:  # noqa: BLE001 - raised in those who wait
            loading.set_exception(error)
        else:
            loading.set_result(engine)

    threading.Thread(target=run, name="octavo-load", daemon=is_daemon).start()
    return loading


def _chat_params(engine: AsyncLLMEngine, params: SamplingParams | None) -> SamplingParams:
    return engine.front.inputs.default_params.replace(max_tokens=None) if params is None else params
