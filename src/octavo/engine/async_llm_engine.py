"""`AsyncLLMEngine`: the engine for async programs. Requests are added while it runs.

Two threads: the event loop owns processors and request states; the engine thread waits for the core's outputs and
passes each step's to the loop. With an in-process core, it also runs the steps.
"""

import asyncio
import atexit
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from octavo.config.args import EngineArgs, for_streaming
from octavo.contracts.engine import EngineCoreOutputs
from octavo.engine.core_client import EngineCoreClient
from octavo.engine.front import EngineFront, ModelName, engine_args, one_per_prompt
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.output_processor import RequestState
from octavo.errors import EngineDeadError, EventLoopError, OctavoError, anew
from octavo.inputs import as_prompt_list
from octavo.lora_request import LoRARequest
from octavo.metrics.collect import EngineMetrics
from octavo.multimodal.media import has_images
from octavo.outputs import RequestOutput
from octavo.sampling_params import PoolingParams, RequestPriority, SamplingParams

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.1  # how often the engine thread checks whether to stop
LONG_TEXT = 8192  # characters, tokenized in a few milliseconds
MANY_BAD_WORDS = 32  # the same


class LiveRequest:
    """A running request with a reader of deltas; created by `AsyncLLMEngine.open`.

    When notified, take what is new from each sample. If nothing is new, `check` raises if the engine is dead.
    Always close it.
    """

    __slots__ = ("_engine", "state")

    def __init__(self, engine: "AsyncLLMEngine", state: RequestState) -> None:
        self._engine, self.state = engine, state

    @property
    def is_settled(self) -> bool:
        """Whether no more output will come: the request has finished or the engine is dead."""
        return self.state.is_finished or self._engine._death is not None

    def check(self) -> None:
        """Raise EngineDeadError if the engine died before the request finished."""
        if not self.state.is_finished:
            self._engine._check_alive()

    def close(self) -> None:
        """Drop the reader; an unfinished request is aborted. Idempotent."""
        self._engine._forget(self.state)


class AsyncLLMEngine:
    """An engine used in one event loop at a time; another one may follow, as with several calls of `asyncio.run`.

        results = await AsyncLLMEngine().generate_async(["Hello", "World"])

    The constructor loads the model and blocks meanwhile; `AsyncLLM` loads without blocking the loop. `exit` shuts it
    down; one that is dropped shuts itself down.
    Options are those of `octavo.config.args.EngineArgs`.
    """

    def __init__(self, model_name: ModelName | None = None, **options: Any) -> None:
        self._open(engine_args(model_name, for_streaming(options)))

    @classmethod
    def from_args(cls, args: EngineArgs, on_stage: Callable[[str], None] = logger.debug) -> Self:
        """Build from validated options; see `EngineFront`."""
        engine = cls.__new__(cls)
        engine._open(args, on_stage)
        return engine

    def _open(self, args: EngineArgs, on_stage: Callable[[str], None] = logger.debug) -> None:
        self._front = EngineFront(args, on_stage)
        self._readers: dict[RequestState, Callable[[], None]] = {}  # called when the state changes
        self._death: OctavoError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # see `_enter_loop`, as for the next two
        self._has_died = asyncio.Event()
        self._entering = threading.Lock()
        self._has_exited = False
        self._pump = OutputPump(self._front.client, self._front.close)
        # Without waiting: a finalizer may run in any thread, at any moment. At exit, the pump sees to that itself.
        weakref.finalize(self, self._pump.should_stop.set).atexit = False

    @property
    def front(self) -> EngineFront:
        """Configuration, tokenizer and processors. Raises RuntimeError after `exit`."""
        if self._has_exited:
            raise RuntimeError("this engine has exited")
        return self._front

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's metrics; still available after `exit`."""
        return self._front.outputs.metrics

    async def stream(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = RequestPriority.NORMAL,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the whole output so far whenever it grows; a slow reader gets several steps at once.

        Leaving the loop early, or cancelling the task, aborts the request. Raises UserError: names the field, its value
        and the limit. EngineDeadError: the engine died.
        """
        [processed] = await self._process(
            [prompt], [sampling_params], [lora_request], request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        updated = asyncio.Event()
        state = self._start(processed, updated.set)
        try:
            is_whole = False  # the last yield was final: the request may finish while the reader is busy
            while not is_whole:
                await updated.wait()
                updated.clear()
                if not state.is_finished:
                    self._check_alive()
                output = state.snapshot()
                is_whole = output.finished
                yield output
        finally:
            self._forget(state)

    def open(self, processed: ProcessedRequest, notify: Callable[[], None]) -> LiveRequest:
        """Start a request, made by `front.process`, with a reader of deltas. Raises EngineDeadError.

        `notify` is called in the event loop whenever there is something new, and must neither raise nor block.
        """
        return LiveRequest(self, self._start(processed, notify))

    async def died(self) -> OctavoError:
        """Wait until the engine dies; return why."""
        self._enter_loop()
        await self._has_died.wait()
        assert self._death is not None
        return self._death

    async def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Generate for one prompt; return its complete output. Options and errors as `stream`."""
        [output] = await self._run(await self._process([prompt], [sampling_params], [lora_request], **options))
        return output

    async def generate_async(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams | PoolingParams] | None = None,
        priority: int = RequestPriority.NORMAL,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many at once; return outputs in the order of the prompts.

        Raises UserError: names the field, its value and the limit; nothing was started.
        """
        prompt_list = as_prompt_list(prompts)
        params_list = one_per_prompt(sampling_params, SamplingParams, len(prompt_list), "sampling_params")
        loras = one_per_prompt(lora_request, LoRARequest, len(prompt_list), "lora_request")
        return await self._run(await self._process(prompt_list, params_list, loras, priority=priority))

    async def chat_prompt(self, messages: Sequence[Mapping[str, object]], **template_options: Any) -> object:
        """Return a conversation as a prompt, by the model's chat template. Images and long texts: in a thread."""
        render = partial(self.front.inputs.chat_prompt, messages, **template_options)
        is_slow = has_images(messages) or len(repr(messages)) > LONG_TEXT
        return await asyncio.to_thread(render) if is_slow else render()

    async def multimodal_prompts(self, requests: Sequence[Mapping[str, object]], processor: Any = None) -> list[object]:
        """Return the prompts of requests with images, prepared in a thread; see `LLM.generate_multimodal`."""
        make = self.front.inputs.multimodal.of_request
        return await asyncio.to_thread(lambda: [make(request, processor) for request in requests])

    async def abort_request(self, request_id: str) -> None:
        """End a request, whose name is free at once; its reader gets the output so far, with finish_reason `abort`."""
        state = self.front.outputs.find(request_id)
        if state is not None:
            self.front.outputs.release(state)
            self.front.client.abort(state.unfinished_core_ids())

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the core between two steps; see `EngineCoreClient.call`."""
        self._check_alive()
        self._pump.check()
        self._enter_loop()
        return await asyncio.to_thread(self.front.client.call, method, *arguments)

    def exit(self) -> None:
        """Shut down the core and free its memory. Open streams end with EngineDeadError. Idempotent."""
        self._has_exited = True
        self._pump.close(EngineDeadError("the engine was closed"))

    async def _process(
        self,
        prompts: Sequence[object],
        params: Sequence[SamplingParams | None],
        loras: Sequence[LoRARequest | None],
        **options: Any,
    ) -> list[ProcessedRequest]:
        """See `EngineFront.process`. What may take a while is done outside the event loop."""
        self._pump.check()  # before the process that validates constraints gets messages from two
        front = self.front
        if options.get("request_id") in front.outputs:
            for _ in range(2):  # turns in which the loop closes a stream whose reader has left by `break`
                await asyncio.sleep(0)

        def work() -> list[ProcessedRequest]:
            return [
                front.process(prompt, one, lora_request=lora, **options)
                for prompt, one, lora in zip(prompts, params, loras, strict=True)
            ]

        given = [one for one in params if isinstance(one, SamplingParams)]
        is_slow = any(one.structured_output or len(one.bad_words) > MANY_BAD_WORDS for one in given)
        if sum(map(_num_characters, prompts)) <= LONG_TEXT and not is_slow and not any(loras):
            return work()
        processed = await asyncio.to_thread(work)
        for request in processed:
            front.outputs.check_free(request.request_id)  # another one may have taken it meanwhile
        return processed

    def _check_alive(self) -> None:
        if self._death is not None:
            raise anew(self._death)

    def _start(self, processed: ProcessedRequest, notify: Callable[[], None]) -> RequestState:
        self._check_alive()
        self._pump.check()
        self._enter_loop()
        state = self.front.start(processed)
        self._readers[state] = notify
        return state

    async def _run(self, requests: Sequence[ProcessedRequest]) -> list[RequestOutput]:
        """Run requests to their ends. One task for all of them: one of its own might be cancelled before it begins."""
        updated = asyncio.Event()
        states: list[RequestState] = []
        try:
            for request in requests:
                states.append(self._start(request, updated.set))  # noqa: PERF401 - if one fails, `finally` knows the rest
            for state in states:
                while not state.is_finished:
                    self._check_alive()
                    await updated.wait()
                    updated.clear()
            return [state.snapshot() for state in states]
        finally:
            for state in states:
                self._forget(state)

    def _forget(self, state: RequestState) -> None:
        """The reader is gone: drop it, and abort the request unless it has finished. Its name is free."""
        self._readers.pop(state, None)
        self._front.outputs.release(state)
        if not state.is_finished and self._death is None:
            with contextlib.suppress(OctavoError):  # the core has just died, and the request with it
                self._front.client.abort(state.unfinished_core_ids())

    def _enter_loop(self) -> None:
        """Let the running loop own the requests from now on. Raises EventLoopError: another loop still does."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        with self._entering:
            if self._loop is not None and not self._loop.is_closed() and (self._loop.is_running() or self._readers):
                raise EventLoopError("the engine", "make requests in that loop (asyncio.run_coroutine_threadsafe)")
            self._loop = loop
        for state in list(self._readers):  # their loop was closed under them
            self._forget(state)
        self._has_died = asyncio.Event()
        if self._death is not None:
            self._has_died.set()
        take_outputs = weakref.WeakMethod(self._take_outputs)  # the pump must not keep the engine alive

        def notify() -> None:
            if (take := take_outputs()) is not None:
                take()

        self._pump.attach(loop, notify)

    def _take_outputs(self) -> None:
        """Process what has arrived from the core; runs in the event loop."""
        if asyncio.get_running_loop() is not self._loop:  # a late call in the loop before
            return
        while self._pump.arrived:
            outputs = self._pump.arrived.popleft()
            if isinstance(outputs, OctavoError):  # why no more will come
                self._death = self._death or outputs
                self._has_died.set()
                for notify in list(self._readers.values()):
                    notify()
                continue
            result = self._front.outputs.process(outputs)
            if result.to_abort:
                self._front.client.abort(result.to_abort)
            for state in result.changed:
                if state in self._readers:
                    self._readers[state]()


class OutputPump:
    """The engine thread: takes outputs from the core and keeps them for the event loop; shuts the core down in the end.

    It does not know its engine, so that one which nobody uses any more is collected; nor does an output depend on the
    loop that happens to be attached when it arrives: the next loop takes what a closed one has left.
    """

    def __init__(self, client: EngineCoreClient, shut_down: Callable[[], None]) -> None:
        self._client, self._shut_down = client, shut_down
        self.arrived: deque[EngineCoreOutputs | OctavoError] = deque()  # oldest first; an error is the last
        self._reader: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None
        self.should_stop = threading.Event()
        self._closed: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before the interpreter takes the thread's world down

    def attach(self, loop: asyncio.AbstractEventLoop, notify: Callable[[], None]) -> None:
        """Have `notify` called in this loop, instead of the one before, whenever there is something to take."""
        self._reader = loop, notify
        self._wake()

    def check(self) -> None:
        """Raise RuntimeError if no outputs will come because this process was forked from the engine's."""
        if not self._has_thread:
            raise RuntimeError("this engine was made in a process that has been forked")

    @property
    def _has_thread(self) -> bool:
        """Whether the thread runs here or has come to its end, unlike in a forked process."""
        return self._thread.is_alive() or self._closed.done()

    def close(self, reason: OctavoError | None = None) -> None:
        """Stop after the step in flight and shut the core down; `reason` is what its readers get. Idempotent.

        Raises what shutting down the core raised.
        """
        self.should_stop.set()
        if not self._has_thread:
            return  # everything belongs to the process that was forked
        self._closed.result()
        if reason is not None:
            self._put(reason)

    def _run(self) -> None:
        try:
            while not self.should_stop.is_set():
                outputs = self._client.get_outputs(_IDLE_WAIT_S)
                if outputs is not None:
                    self._put(outputs)
        except EngineDeadError as death:
            self._put(death)
        except Exception as error:
            logger.exception("the engine thread cannot continue")
            self._put(EngineDeadError(f"{type(error).__name__}: {error}"))
        self.should_stop.wait()
        try:
            self._shut_down()
        except BaseException as error:  # noqa: BLE001 - raised by `close`
            self._closed.set_exception(error)
        else:
            self._closed.set_result(None)
        atexit.unregister(self.close)

    def _put(self, item: EngineCoreOutputs | OctavoError) -> None:
        self.arrived.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            loop, notify = self._reader
            with contextlib.suppress(RuntimeError):  # it has closed; the next loop takes the outputs
                loop.call_soon_threadsafe(notify)


def _num_characters(prompt: object) -> int:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0
