"""The grammars of all requests that have one: compiled in threads, advanced here, with masks computed one step ahead.

A request is *pending* until its grammar is compiled and *held* afterwards. The mask for its next token is computed as
soon as its last token is known, so the scheduler finds it ready and knows at once when the output is complete.

Legend: M = requests, W = words of one mask.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Generic

import numpy as np

from octavo.contracts.engine import EngineCoreRequest
from octavo.contracts.schedule import Int32Array
from octavo.errors import GrammarError, GrammarTooComplexError, OctavoError
from octavo.structured.backend import GrammarBackend, MatcherT
from octavo.structured.compiler import CompileJob, GrammarCompiler

COMPILE_TIME_LIMIT_S = 10.0


class _Held(Generic[MatcherT]):
    """A request with its compiled grammar."""

    def __init__(self, matcher: MatcherT, banned: Int32Array | None) -> None:
        self.matcher = matcher
        self.banned = banned  # [W] EOS tokens of the model that must not end this request
        self.mask: Int32Array | None = None  # [W] for the next token


class GrammarManager(Generic[MatcherT]):
    """Implements the scheduler's `Grammars`. Owned by the core's thread; only compilation uses other threads."""

    def __init__(
        self, make_backend: Callable[[], GrammarBackend[MatcherT]], *, time_limit_s: float = COMPILE_TIME_LIMIT_S
    ) -> None:
        self._compiler = GrammarCompiler(make_backend)
        self._time_limit_s = time_limit_s
        self._pending: dict[str, tuple[EngineCoreRequest, CompileJob[MatcherT]]] = {}
        self._held: dict[str, _Held[MatcherT]] = {}

    def begin(self, message: EngineCoreRequest) -> None:
        constraint = message.sampling_params.structured_output
        assert constraint is not None
        self._pending[message.request_id] = message, self._compiler.submit(constraint)

    def take_compiled(self) -> dict[str, OctavoError | None]:
        now_s = time.monotonic()
        over = [name for name, (_, job) in self._pending.items() if job.is_over(now_s, self._time_limit_s)]
        return {request_id: self._take(*self._pending.pop(request_id)) for request_id in over}

    def wait(self, timeout_s: float) -> None:
        """Wait until a pending request's grammar is ready, for at most `timeout_s`."""
        wait([job.future for _, job in self._pending.values()], timeout_s, FIRST_COMPLETED)

    def masks(self, request_ids: Sequence[str]) -> Int32Array:
        return np.stack([_ready(self._held[request_id].mask) for request_id in request_ids])

    def masks_along(self, request_id: str, draft_ids: Sequence[int]) -> Int32Array:
        held = self._held[request_id]
        trial, masks = _Held(held.matcher.copy(), held.banned), [_ready(held.mask)]
        for token_id in draft_ids:
            try:
                trial.matcher.accept(token_id)
            except (GrammarError, GrammarTooComplexError):
                break
            if trial.matcher.is_complete or self._make_masks({request_id: trial}) or trial.matcher.is_complete:
                break
            masks.append(_ready(trial.mask))
        return np.stack(masks)

    def forced(self, request_id: str) -> list[int]:
        return self._held[request_id].matcher.forced()

    def advance(self, sampled: Mapping[str, Sequence[int]]) -> dict[str, OctavoError | None]:
        failed: dict[str, OctavoError] = {}
        for request_id, token_ids in sampled.items():
            try:
                for token_id in token_ids:
                    self._held[request_id].matcher.accept(token_id)
            except (GrammarError, GrammarTooComplexError) as error:
                failed[request_id] = error
        going = [request_id for request_id in sampled if request_id not in failed]
        complete = self._complete_of(going)
        failed |= self._make_masks({one: self._held[one] for one in going if one not in complete})
        complete |= self._complete_of([request_id for request_id in going if request_id not in failed])
        return dict.fromkeys(complete) | failed

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self._held.pop(request_id, None)

    def close(self) -> None:
        """Start no more compilations."""
        self._compiler.close()

    def _take(self, message: EngineCoreRequest, job: CompileJob[MatcherT]) -> OctavoError | None:
        """Move a request from pending to held; return the error if that fails."""
        if (error := job.error(self._time_limit_s)) is not None:
            return error
        held = _Held(job.future.result().matcher(), self._banned(message))
        try:
            for token_id in message.resumed_token_ids:
                held.matcher.accept(token_id)
        except (GrammarError, GrammarTooComplexError) as error:
            return error
        self._held[message.request_id] = held
        return self._make_masks({message.request_id: self._held[message.request_id]}).get(message.request_id)

    def _banned(self, message: EngineCoreRequest) -> Int32Array | None:
        """Return a mask [W] of EOS tokens that must not end this request."""
        backend = self._compiler.backend
        own = () if message.sampling_params.ignore_eos else message.eos_token_ids
        token_ids = np.array(sorted(backend.end_token_ids.difference(own)), dtype=np.int64)
        if not len(token_ids):
            return None
        is_banned = np.zeros(backend.num_words * 32, dtype=np.uint8)
        is_banned[token_ids] = 1
        return np.packbits(is_banned, bitorder="little").view(np.int32)

    def _complete_of(self, request_ids: Sequence[str]) -> frozenset[str]:
        return frozenset(request_id for request_id in request_ids if self._held[request_id].matcher.is_complete)

    def _make_masks(self, requests: Mapping[str, _Held[MatcherT]]) -> dict[str, OctavoError]:
        """Make the next masks of these requests; return those that cannot go on."""
        if not requests:
            return {}
        backend, held = self._compiler.backend, list(requests.values())
        words = np.zeros((len(held), backend.num_words), dtype=np.int32)  # [M, W]
        problems = backend.fill_masks([one.matcher for one in held], words)
        for one, mask in zip(held, words, strict=True):
            one.mask = mask if one.banned is None else mask & ~one.banned
        return {
            request_id: problem for request_id, problem in zip(requests, problems, strict=True) if problem is not None
        }


def _ready(mask: Int32Array | None) -> Int32Array:
    assert mask is not None
    return mask
