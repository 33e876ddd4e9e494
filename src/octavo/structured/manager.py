"""The grammars of all requests that have one: compiled in threads, advanced here, with masks computed one step ahead.

A request is *pending* until its grammar is compiled and *held* afterwards. The mask for its next token is computed as
soon as its last token is known, so the scheduler finds it ready and knows at once when the output is complete.

Legend: M = requests, W = words of one mask.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.contracts.engine import EngineCoreRequest
from octavo.contracts.schedule import Int32Array
from octavo.errors import (
    GrammarError,
    GrammarTooComplexError,
    InvalidParameterError,
    OctavoError,
    RequestError,
    UserError,
)
from octavo.structured_output import StructuredOutput

if TYPE_CHECKING:  # the library loads with the first constraint
    from octavo.structured.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher

COMPILE_TIME_LIMIT_S = 10.0
MAX_CACHED = 64
NUM_THREADS = 2


class GrammarManager:
    """Grammars by request id. Owned by the scheduler's thread; only compilation uses other threads.

    The backend, which takes a second for a large vocabulary, is created with the first request.
    """

    def __init__(
        self, make_backend: "Callable[[], LLGuidanceBackend]", *, time_limit_s: float = COMPILE_TIME_LIMIT_S
    ) -> None:
        self._make_backend = make_backend
        self._time_limit_s = time_limit_s
        self._threads: ThreadPoolExecutor | None = None
        self._backend: Future[LLGuidanceBackend] | None = None
        self._jobs: OrderedDict[StructuredOutput, _CompileJob] = OrderedDict()  # least recently used first
        self._pending: dict[str, tuple[EngineCoreRequest, _CompileJob]] = {}
        self._held: dict[str, _Held] = {}

    def begin(self, message: EngineCoreRequest) -> None:
        """Start compiling the request's constraint in the background."""
        constraint = message.params.structured_output
        assert constraint is not None
        self._pending[message.request_id] = message, self._job_for(constraint)

    def take_compiled(self) -> dict[str, OctavoError | None]:
        """Return the requests whose compilation ended since the last call, each with its error or None."""
        now_s = time.monotonic()
        over = [name for name, (_, job) in self._pending.items() if job.is_over(now_s, self._time_limit_s)]
        return {request_id: self._take(*self._pending.pop(request_id)) for request_id in over}

    def wait(self, timeout_s: float) -> None:
        """Wait until a compilation ends, for at most `timeout_s`."""
        wait([job.future for _, job in self._pending.values()], timeout_s, FIRST_COMPLETED)

    def masks(self, request_ids: Sequence[str]) -> Int32Array:
        """Return the allowed next tokens [M, W]: bit b of word w is token 32 w + b."""
        return np.stack([self._held[request_id].mask for request_id in request_ids])

    def masks_along(self, request_id: str, token_ids: Sequence[int]) -> Int32Array:
        """Return which tokens may come next and after each of `token_ids`: [1 + K', W]. The state does not change.

        The first K' of these K tokens are usable: the grammar accepts each of them and is not complete after it.
        """
        held = self._held[request_id]
        trial, masks = _Held(held.matcher.copy(), held.banned), [held.mask]
        for token_id in token_ids:
            try:
                trial.matcher.accept(token_id)
            except (GrammarError, GrammarTooComplexError):
                break
            if trial.matcher.is_complete or self._make_masks({request_id: trial}) or trial.matcher.is_complete:
                break
            masks.append(trial.mask)
        return np.stack(masks)

    def forced(self, request_id: str) -> list[int]:
        """Return next tokens that the grammar leaves no choice about, as its tokenizer would spell them; often none."""
        return self._held[request_id].matcher.forced()

    def advance(self, sampled: Mapping[str, Sequence[int]]) -> dict[str, OctavoError | None]:
        """Advance these requests by their sampled tokens and compute their next masks.

        Returns those that end: with None the constraint is satisfied and nothing may follow, else with an error.
        """
        failed: dict[str, OctavoError] = {}
        for request_id, token_ids in sampled.items():
            try:
                for token_id in token_ids:
                    self._held[request_id].matcher.accept(token_id)
            except (GrammarError, GrammarTooComplexError) as error:
                failed[request_id] = error
        going = {request_id: self._held[request_id] for request_id in sampled if request_id not in failed}
        failed |= self._make_masks({name: held for name, held in going.items() if not held.matcher.is_complete})
        complete = [name for name, held in going.items() if name not in failed and held.matcher.is_complete]
        return dict.fromkeys(complete) | failed

    def forget(self, request_id: str) -> None:
        """Drop a request in any state. Cheap for unknown ids."""
        self._pending.pop(request_id, None)
        self._held.pop(request_id, None)

    def close(self) -> None:
        """Start no more compilations. A running one ends by the backend's own limits."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _made_backend(self) -> "LLGuidanceBackend":
        """The backend; waits for it to be made."""
        assert self._backend is not None
        return self._backend.result()

    def _job_for(self, constraint: StructuredOutput) -> "_CompileJob":
        """Return the job that compiles a constraint; start one unless it is cached."""
        if constraint in self._jobs:
            self._jobs.move_to_end(constraint)
            return self._jobs[constraint]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-grammar")
            self._backend = self._threads.submit(self._make_backend)
        job = self._jobs[constraint] = _CompileJob()
        self._threads.submit(self._compile, job, constraint)
        if len(self._jobs) > MAX_CACHED:
            self._jobs.popitem(last=False)
        return job

    def _compile(self, job: "_CompileJob", constraint: StructuredOutput) -> None:
        """Run in a thread."""
        try:
            backend = self._made_backend
            job.started_s = time.monotonic()
            job.future.set_result(backend.compile(constraint))
        except BaseException as error:  # noqa: BLE001 - it belongs to the requests that wait; a panic is no `Exception`
            job.future.set_exception(error)

    def _take(self, message: EngineCoreRequest, job: "_CompileJob") -> OctavoError | None:
        """Move a request from pending to held; return the error if that fails."""
        if (error := job.error(self._time_limit_s)) is not None:
            return error
        held = _Held(job.future.result().copy(), self._banned(message))
        try:
            for token_id in message.resumed_token_ids:
                held.matcher.accept(token_id)
        except (GrammarError, GrammarTooComplexError) as error:
            return error
        self._held[message.request_id] = held
        return self._make_masks({message.request_id: held}).get(message.request_id)

    def _banned(self, message: EngineCoreRequest) -> Int32Array | None:
        """Return a mask [W] of EOS tokens that must not end this request."""
        backend = self._made_backend
        own = () if message.params.ignore_eos else message.eos_token_ids
        token_ids = np.array(sorted(backend.end_token_ids.difference(own)), dtype=np.int64)
        if not len(token_ids):
            return None
        is_banned = np.zeros(backend.num_words * 32, dtype=np.uint8)
        is_banned[token_ids] = 1
        return np.packbits(is_banned, bitorder="little").view(np.int32)

    def _make_masks(self, requests: "Mapping[str, _Held]") -> dict[str, OctavoError]:
        """Make the next masks of these requests; return those that cannot go on."""
        if not requests:
            return {}
        backend, held = self._made_backend, list(requests.values())
        words = np.zeros((len(held), backend.num_words), dtype=np.int32)  # [M, W]
        problems = backend.fill_masks([one.matcher for one in held], words)
        for one, mask in zip(held, words, strict=True):
            one.mask = mask if one.banned is None else mask & ~one.banned
        return {
            request_id: problem for request_id, problem in zip(requests, problems, strict=True) if problem is not None
        }


@dataclass(slots=True)
class _Held:
    """A request with its compiled grammar."""

    matcher: "LLGuidanceMatcher"
    banned: Int32Array | None  # [W] EOS tokens of the model that must not end this request
    mask: Int32Array = field(init=False)  # [W] for the next token, once it has been made


class _CompileJob:
    """One constraint being compiled, or compiled, for all requests that have it."""

    def __init__(self) -> None:
        self.future: Future[LLGuidanceMatcher] = Future()  # in its initial state, to be copied
        self.started_s: float | None = None

    def is_over(self, now_s: float, time_limit_s: float) -> bool:
        """True if there is nothing left to wait for."""
        return self.future.done() or (self.started_s is not None and now_s - self.started_s > time_limit_s)

    def error(self, time_limit_s: float) -> OctavoError | None:
        """Return why this finished job failed, or None."""
        if not self.future.done():
            return GrammarTooComplexError(f"structured_output was not compiled within {time_limit_s:g} s")
        error = self.future.exception()
        if isinstance(error, InvalidParameterError):
            return UserError(str(error))  # fields of an error do not cross the process boundary
        if error is None or isinstance(error, OctavoError):
            return error
        text = f"compiling structured_output failed: {type(error).__name__}: {error}"
        # The library refuses with a ValueError, or a panic, which is no `Exception`.
        is_refusal = isinstance(error, ValueError) or not isinstance(error, Exception)
        return UserError(text) if is_refusal else RequestError(text)
