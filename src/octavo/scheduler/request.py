"""A request as the scheduler sees it, the single source of truth for its tokens and progress, and what ends it."""

from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np

from octavo.contracts.engine import EngineCoreRequest, FinishedRequest
from octavo.contracts.schedule import BoolArray, Int32Array
from octavo.sampling_params import SamplingParams
from octavo.scheduler.block_manager import NO_KEYS, BlockKeys, root_hash


class RequestStatus(Enum):
    """The state of a request. The last four are final."""

    WAITING = "waiting"  # for a row, or for what `Request.waits_for` says
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, with output tokens
    STOPPED = "stop"
    LENGTH_CAPPED = "length"
    ABORTED = "abort"
    FAILED = "error"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({RequestStatus.STOPPED, RequestStatus.LENGTH_CAPPED, RequestStatus.ABORTED, RequestStatus.FAILED})


class Request:
    """One sample being generated.

    While it runs, its tokens and counts live in its row of `RunningRows`; otherwise `token_ids` holds all tokens.
    """

    def __init__(self, message: EngineCoreRequest, arrival_index: int, max_model_len: int) -> None:
        self.message = message
        self.is_constrained = self.params.structured_output is not None
        self.arrival_index = arrival_index
        self.priority = message.priority
        self.aged_class = self.priority  # as of its admission: its waiting time still counts while it runs
        self.status = RequestStatus.WAITING
        self.waits_for: str | None = None  # the reason of the gate that holds it; None: it is queued, or was
        self.row: int | None = None
        known = message.prompt_token_ids + message.resumed_token_ids
        self.token_ids: Int32Array = np.array(known, dtype=np.int32)
        self.num_prompt_tokens = len(message.prompt_token_ids)
        max_tokens = self.params.max_tokens
        wanted = max_model_len if max_tokens is None else self.num_prompt_tokens + max_tokens
        self.max_num_tokens = min(wanted, max_model_len)  # tokens at which it ends
        self.stop_token_ids = frozenset(self.params.stop_token_ids) | self.active_eos_token_ids
        self.block_root = root_hash(message.prefix_keys)
        # Set by `EncoderSchedule`: what ranks get of the message's, which tokens' blocks have keys, and whether chunks
        # may have to end early.
        self.extra_inputs = message.extra_inputs
        self.block_keys: BlockKeys = NO_KEYS
        self.limits_chunks = False
        self.num_preemptions = 0

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def params(self) -> SamplingParams:
        return self.message.params

    @property
    def active_eos_token_ids(self) -> frozenset[int]:
        """EOS tokens that end this request: none with `ignore_eos`."""
        return frozenset() if self.params.ignore_eos else frozenset(self.message.eos_token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Smallest runs first; the largest running one is preempted first."""
        return self.aged_class, self.arrival_index

    def check_stop(self, token_id: int, num_tokens: int) -> FinishedRequest | None:
        """Decide whether `token_id`, now the last of `num_tokens` known tokens, ends the request.

        A stop token takes precedence over the length limit. `stop_token_id` is only reported for ids in the request's
        own `stop_token_ids`, as clients expect. Stop strings are the frontend's: text exists only there.
        """
        num_output_tokens = num_tokens - self.num_prompt_tokens
        if token_id in self.stop_token_ids and num_output_tokens > self.params.min_tokens:
            named = None if token_id in self.active_eos_token_ids else token_id
            return self.report(RequestStatus.STOPPED, stop_token_id=named)
        if num_tokens >= self.max_num_tokens:
            return self.report(RequestStatus.LENGTH_CAPPED)
        return None

    def report(self, status: RequestStatus, **details: Any) -> FinishedRequest:
        """Report how the request ends; `details` are fields of the report."""
        return FinishedRequest(finish_reason=status.value, num_preemptions=self.num_preemptions, **details)


class StopIdTable:
    """The union of all stop ids seen, as a table: a cheap check of sampled tokens. `check_stop` decides about a hit."""

    def __init__(self) -> None:
        self._may_stop: BoolArray = np.zeros(1024, dtype=np.bool_)  # the last entry is False, and covers all larger ids

    def add_ids(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= len(self._may_stop) - 1:
                grown = np.zeros(max(token_id + 2, 2 * len(self._may_stop)), dtype=np.bool_)
                grown[: len(self._may_stop)] = self._may_stop
                self._may_stop = grown
            self._may_stop[token_id] = True

    def candidates(self, token_ids: Int32Array) -> BoolArray:
        """Return which of `token_ids` [R] are in the table."""
        return self._may_stop.take(token_ids, mode="clip")
