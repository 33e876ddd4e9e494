"""The one thread that works on an `LLMEngine`: the requests of all its callers, who wait for it, as one batch.

Python runs signal handlers in the main thread, between any two of its instructions. An exception from one, such as
Ctrl-C, can therefore interrupt a caller's wait but never the work, whose messages and states stay in step.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from octavo.engine.front import EngineFront
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.output_processor import RequestState
from octavo.errors import EngineDeadError
from octavo.outputs import RequestOutput

ResultT = TypeVar("ResultT")

_SIGNALS_S = 1.0  # how long a signal that the kernel delivers to another thread may stay unnoticed by a waiting caller
_WAIT_S = 0.1  # per wait for a core in another process; callers that have left are noticed in between

StepOutputs = tuple[list[RequestOutput], int]


class Call(Generic[ResultT]):
    """One caller's wait for the owner.

    It waits for a plain lock: an exception inside `Condition.__enter__`, of which `Future` is made, leaves that locked.
    """

    __slots__ = ("_error", "_is_pending", "_result", "_start", "is_abandoned", "is_taken")

    def __init__(self, start: "Callable[[Call[ResultT]], None]") -> None:
        self._start = start
        self._is_pending = threading.Lock()
        self._is_pending.acquire()
        self._result: ResultT | None = None
        self._error: BaseException | None = None
        self.is_taken = False  # the caller has the result
        self.is_abandoned = False  # the caller was interrupted, possibly after the answer

    def start_work(self) -> None:
        """On the owner's thread."""
        try:
            self._start(self)
        except BaseException as error:  # noqa: BLE001 - raised in the waiting caller
            self.fail(error)

    def finish(self, result: ResultT) -> None:
        self._result = result
        self._is_pending.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._is_pending.release()

    def wait(self) -> ResultT:
        """Return the result, or raise what the owner raised."""
        while not self._is_pending.acquire(timeout=_SIGNALS_S):
            pass
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return self._result  # type: ignore[return-value]  # `finish` has set it


class OwnerThread:
    """Runs from construction until `stop`. It is a daemon: a program may end while it works."""

    def __init__(self, work: "BatchRunner") -> None:
        self._work = work
        self._inbox: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()  # None: look whether to stop
        self._should_stop = False
        self._is_closed = False
        self._failure: BaseException | None = None  # why it could not close
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def ask(self, start: Callable[[Call[ResultT]], None]) -> ResultT:
        """Let the owner call `start`, which answers the call, at once or in a later turn; wait for the answer."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("an engine's own thread cannot wait for the engine")
        call = Call(start)
        try:
            self._inbox.put(call)  # type: ignore[arg-type]  # the inbox never looks at results
            if self._is_closed or not self._thread.is_alive():  # in a forked process, the thread does not exist
                raise RuntimeError("this engine has exited, or was made in a process that has been forked")
            result = call.wait()
            call.is_taken = True  # nothing can interrupt between this and the return
            return result
        except BaseException:
            call.is_abandoned = True  # nothing can interrupt before this, however many signals arrive
            raise

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Let the owner call a function between two turns; return its result."""

        def start(call: Call[ResultT]) -> None:
            call.finish(function())

        return self.ask(start)

    def stop(self) -> None:
        """Close the work after the turn in progress. On the owner's own thread (a finalizer), do not wait for that."""
        self._should_stop = True
        self._inbox.put(None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while not self._should_stop:
            # Begin all calls that have arrived; if there is nothing else to do, wait for one.
            while self._take_call(wait=not self._work.is_busy) and not self._should_stop:
                pass
            if self._work.is_busy and not self._should_stop:
                self._work.notice_abandoned()
                self._work.turn()
        self._is_closed = True  # from now on callers look after themselves; those before are in the inbox
        while self._take_call(wait=False):
            pass
        try:
            self._work.close()
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self._failure = error

    def _take_call(self, *, wait: bool) -> bool:  # a method, so that no variable keeps a call during the next wait
        try:
            call = self._inbox.get(block=wait)
        except queue.Empty:
            return False
        self._work.notice_abandoned()  # a caller that was interrupted, and calls again, finds nothing of its old call
        while self._work.leaving and not self._should_stop:
            self._work.turn()
        if call is None or call.is_abandoned:
            return True
        if self._should_stop:
            call.fail(RuntimeError("this engine has exited"))
        else:
            call.start_work()
        return True


class _Batch:
    """The requests of one `generate`, with a bar of those finished and of tokens per second."""

    def __init__(self, call: Call[list[RequestOutput]], states: list[RequestState], *, shows_progress: bool) -> None:
        self.call, self.states, self.num_left = call, states, len(states)
        self.bar = tqdm(
            total=len(states), desc="Prompts", unit="prompt", disable=not shows_progress, dynamic_ncols=True
        )
        self._start_s = time.perf_counter()
        self._num_in = self._num_out = self._num_images = 0

    def finish_one(self, state: RequestState) -> None:
        """Count a finished prompt."""
        self.num_left -= 1
        self._num_in += state.num_prompt_tokens
        self._num_out += state.num_output_tokens
        self._num_images += state.num_images
        elapsed_s = max(time.perf_counter() - self._start_s, 1e-9)
        rates = f"in {self._num_in / elapsed_s:.0f} tok/s, out {self._num_out / elapsed_s:.0f} tok/s"
        if self._num_images:
            rates += f", {self._num_images / elapsed_s:.1f} images/s"
        self.bar.set_postfix_str(rates, refresh=False)
        self.bar.update()


class BatchRunner:
    """What the thread works on. All methods run on it; those that it calls itself do not raise."""

    def __init__(self, front: EngineFront) -> None:
        self._front = front
        self._batches: list[_Batch] = []
        self._batch_of: dict[RequestState, _Batch] = {}  # of unfinished requests
        self._steps: deque[Call[StepOutputs]] = deque()  # each gets the outputs of one step
        self._unseen: dict[str, RequestOutput] = {}  # changed in steps for others; the next of `_steps` returns them
        self.leaving: set[RequestState] = set()  # aborted requests whose callers have left; they end before new calls
        self._untaken: list[tuple[Call[Any], Callable[[], None]]] = []  # answers, and what undoes those not taken

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do for a caller or for one that has left."""
        return bool(self._batches or self._steps or self.leaving)

    def has_unfinished(self) -> bool:
        """Whether a step would return something: an unfinished request, or an output that has not been returned."""
        return bool(len(self._front.outputs) or self._unseen)

    def start_batch(
        self, call: Call[list[RequestOutput]], make: Sequence[Callable[[], ProcessedRequest]], *, shows_progress: bool
    ) -> None:
        """Validate all requests, then start them; the call is answered when the last one has finished."""
        processed = []
        for make_one in make:
            if call.is_abandoned:
                return
            processed.append(make_one())
        states: list[RequestState] = []
        try:
            for request in processed:
                states.append(self._front.start(request))  # noqa: PERF401 - if one fails, the others must end
        except BaseException:
            self._leave(states)
            raise
        batch = _Batch(call, states, shows_progress=shows_progress)
        self._batches.append(batch)
        self._batch_of.update(dict.fromkeys(states, batch))
        if not states:
            self._finish(batch)

    def start_request(self, call: Call[str], make: Callable[[], ProcessedRequest]) -> None:
        """Start a request whose outputs are returned by steps."""
        state = self._front.start(make())
        self._untaken.append((call, partial(self._leave, [state])))
        call.finish(state.request_id)

    def start_step(self, call: Call[StepOutputs]) -> None:
        """Answer the call with the outputs of the next step."""
        self._steps.append(call)

    def notice_abandoned(self) -> None:
        """End the requests of callers that have left; keep the outputs of steps that nobody has taken."""
        try:
            for batch in [batch for batch in self._batches if batch.call.is_abandoned]:
                self._forget(batch)
                self._leave(batch.states)
            if self._steps:
                self._steps = deque(call for call in self._steps if not call.is_abandoned)
            if self._untaken:
                untaken, self._untaken = self._untaken, []
                for call, undo in untaken:
                    if call.is_abandoned:
                        undo()
                    elif not call.is_taken:
                        self._untaken.append((call, undo))
        except BaseException as error:  # noqa: BLE001 - raised in the callers
            self._fail_all(error)

    def turn(self) -> None:
        """Run one step for all callers; return without one if a core in another process takes longer."""
        try:
            front = self._front
            core_outputs = front.client.get_outputs(_WAIT_S if len(front.outputs) else 0.0)
            if core_outputs is None:
                if self._steps and not len(front.outputs):
                    self._answer_step([], 0)
                return
            result = front.outputs.process(core_outputs)
            if result.to_abort:
                front.client.abort(result.to_abort)
            others = [state for state in result.changed if not self._is_of_a_batch(state)]
            if self._steps:
                self._answer_step(others, result.num_tokens)
            else:
                self._unseen.update((state.request_id, state.snapshot()) for state in others)
        except BaseException as error:  # noqa: BLE001 - raised in the callers
            self._fail_all(error)

    def close(self) -> None:
        """Fail the calls of other threads; shut down the core."""
        self._fail_all(EngineDeadError("the engine was closed"))
        self._front.close()

    def _is_of_a_batch(self, state: RequestState) -> bool:
        """Note what a step changed in a request of a batch, or of a caller that has left; False for others."""
        batch = self._batch_of.get(state)
        if batch is None:
            if state not in self.leaving:
                return False
            if state.is_finished:
                self.leaving.remove(state)
        elif state.is_finished:
            del self._batch_of[state]
            batch.finish_one(state)
            if not batch.num_left:
                self._finish(batch)
        return True

    def _finish(self, batch: _Batch) -> None:
        outputs = [state.snapshot() for state in batch.states]
        self._forget(batch)
        batch.call.finish(outputs)

    def _forget(self, batch: _Batch) -> None:
        batch.bar.close()  # first: if it raises, the batch is still there for `_fail_all`
        self._batches.remove(batch)
        for state in batch.states:
            self._batch_of.pop(state, None)

    def _leave(self, states: list[RequestState]) -> None:
        """Abort what is unfinished of these requests, whose caller has left; nobody sees their outputs."""
        for state in states:
            self._unseen.pop(state.request_id, None)
        if unfinished := [state for state in states if not state.is_finished]:
            self._front.client.abort([core_id for state in unfinished for core_id in state.unfinished_core_ids()])
            self.leaving.update(unfinished)

    def _answer_step(self, changed: list[RequestState], num_tokens: int) -> None:
        outputs = [*self._unseen.values(), *(state.snapshot() for state in changed)]
        self._unseen = {}
        call = self._steps.popleft()
        if outputs:
            self._untaken.append((call, partial(self._return_later, outputs)))
        call.finish((outputs, num_tokens))

    def _return_later(self, outputs: list[RequestOutput]) -> None:
        """The caller of a step was interrupted: the next step returns its outputs, unless there are newer ones."""
        self._unseen = {output.request_id: output for output in outputs} | self._unseen

    def _fail_all(self, error: BaseException) -> None:
        """Raise the error in all callers, and let go of their requests."""
        unfinished = [*self._batch_of, *self.leaving]
        batches, self._batches = self._batches, []
        self._batch_of.clear()
        self.leaving.clear()
        for batch in batches:
            batch.call.fail(error)
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone, which may be the very error
                batch.bar.close()
        while self._steps:
            self._steps.popleft().fail(error)
        if unfinished:
            with contextlib.suppress(EngineDeadError):  # the callers have an error, and the next call gets this one
                self._front.client.abort([core_id for state in unfinished for core_id in state.unfinished_core_ids()])
