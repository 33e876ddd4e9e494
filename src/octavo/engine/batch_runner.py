"""`BatchRunner`: what the owner thread of an `LLMEngine` works on: the requests of all its callers, as one batch."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.engine.front import EngineFront
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.owner_thread import Call
from octavo.engine.progress_bar import ProgressBar
from octavo.engine.request_state import RequestState
from octavo.errors import EngineDeadError
from octavo.outputs import RequestOutput

_WAIT_S = 0.1  # per wait for a core in another process; callers that have left are noticed in between

StepOutputs = tuple[list[RequestOutput], int]


@dataclass(slots=True)
class _Batch:
    """The requests of one `generate`."""

    call: Call[list[RequestOutput]]
    states: list[RequestState]
    progress: ProgressBar
    num_left: int


class BatchRunner:
    """Implements `Work`. All methods run on the owner's thread."""

    def __init__(self, front: EngineFront) -> None:
        self._front = front
        self._batches: list[_Batch] = []
        self._batch_of: dict[str, _Batch] = {}  # unfinished request id -> its batch
        self._steps: deque[Call[StepOutputs]] = deque()  # each gets the outputs of one step
        self._unseen: dict[str, RequestOutput] = {}  # changed in steps for others; the next of `_steps` returns them
        self._leaving: set[str] = set()  # aborted requests whose callers have left
        self._untaken: list[tuple[Call[Any], Callable[[], None]]] = []  # answers, and what undoes those not taken

    @property
    def is_busy(self) -> bool:
        return bool(self._batches or self._steps or self._leaving)

    @property
    def is_leaving(self) -> bool:
        return bool(self._leaving)

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
        batch = _Batch(call, states, ProgressBar(len(states), enabled=shows_progress), len(states))
        self._batches.append(batch)
        self._batch_of.update((state.request_id, batch) for state in states)
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
            self._step()
        except BaseException as error:  # noqa: BLE001 - raised in the callers
            self._fail_all(error)

    def close(self) -> None:
        """Fail the calls of other threads; shut down the core."""
        self._fail_all(EngineDeadError("the engine was closed"))
        self._front.close()

    def _step(self) -> None:
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

    def _is_of_a_batch(self, state: RequestState) -> bool:
        """Note what a step changed in a request of a batch, or of a caller that has left; False for others."""
        request_id = state.request_id
        batch = self._batch_of.get(request_id)
        if batch is None:
            if request_id not in self._leaving:
                return False
            if state.is_finished:
                self._leaving.remove(request_id)
        elif state.is_finished:
            del self._batch_of[request_id]
            batch.num_left -= 1
            batch.progress.finish_one(state.num_prompt_tokens, state.num_output_tokens, state.num_images)
            if not batch.num_left:
                self._finish(batch)
        return True

    def _finish(self, batch: _Batch) -> None:
        outputs = [state.snapshot() for state in batch.states]
        self._forget(batch)
        batch.call.finish(outputs)

    def _forget(self, batch: _Batch) -> None:
        batch.progress.close()  # first: if it raises, the batch is still there for `_fail_all`
        self._batches.remove(batch)
        for state in batch.states:
            self._batch_of.pop(state.request_id, None)

    def _leave(self, states: list[RequestState]) -> None:
        """Abort what is unfinished of these requests, whose caller has left; nobody sees their outputs."""
        unfinished = [state.request_id for state in states if not state.is_finished]
        for state in states:
            self._unseen.pop(state.request_id, None)
        if unfinished:
            self._front.client.abort(self._core_ids(unfinished))
            self._leaving.update(unfinished)

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
        unfinished = [*self._batch_of, *self._leaving]
        batches, self._batches = self._batches, []
        self._batch_of.clear()
        self._leaving.clear()
        for batch in batches:
            batch.call.fail(error)
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone, which may be the very error
                batch.progress.close()
        while self._steps:
            self._steps.popleft().fail(error)
        if unfinished:
            with contextlib.suppress(EngineDeadError):  # the callers have an error, and the next call gets this one
                self._front.client.abort(self._core_ids(unfinished))

    def _core_ids(self, request_ids: Sequence[str]) -> list[str]:
        return [core_id for request_id in request_ids for core_id in self._front.outputs.core_ids(request_id)]
