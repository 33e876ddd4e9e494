"""A request as the scheduler sees it: the single source of truth for its tokens and progress."""

from enum import Enum

import msgspec
import numpy as np

from octavo.contracts.engine import EngineCoreRequest, ExtraInputs, VisionInput
from octavo.contracts.schedule import NO_SLOT, Int32Array
from octavo.sampling_params import SamplingParams
from octavo.scheduler.block_hash import NO_KEYS, BlockKeys, request_root


class RequestStatus(Enum):
    """The state of a request. The last four are final."""

    WAITING_FOR_GRAMMAR = "waiting for its grammar"  # not in the queue yet
    WAITING_FOR_ADAPTER = "waiting for its adapter"  # neither
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, with output tokens
    STOPPED = "stop"
    LENGTH_CAPPED = "length"
    ABORTED = "abort"
    FAILED = "error"

    @property
    def is_final(self) -> bool:
        return self in _FINAL

    @property
    def is_held_back(self) -> bool:
        return self in _HELD_BACK


_FINAL = frozenset({RequestStatus.STOPPED, RequestStatus.LENGTH_CAPPED, RequestStatus.ABORTED, RequestStatus.FAILED})

_HELD_BACK = frozenset({RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.WAITING_FOR_ADAPTER})


class Request:
    """One sample being generated.

    While it runs, its tokens and counts live in its row of `RunningRows`; otherwise `token_ids` holds all tokens.
    """

    __slots__ = (
        "adapter",
        "adapter_slot",
        "aged_class",
        "arrival_index",
        "block_keys",
        "block_root",
        "extra_inputs",
        "is_constrained",
        "max_num_tokens",
        "message",
        "num_accepted_drafts",
        "num_drafts",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "row",
        "status",
        "stop_token_ids",
        "token_ids",
        "vision",
        "whole_spans",
    )

    def __init__(self, message: EngineCoreRequest, arrival_index: int, max_model_len: int) -> None:
        self.message = message
        self.is_constrained = message.sampling_params.structured_output is not None
        self.arrival_index = arrival_index
        self.priority = message.priority
        self.aged_class = self.priority  # as of its admission: its waiting time still counts while it runs
        self.status = RequestStatus.WAITING
        self.row: int | None = None
        known = message.prompt_token_ids + message.resumed_token_ids
        self.token_ids: Int32Array = np.array(known, dtype=np.int32)
        self.num_prompt_tokens = len(message.prompt_token_ids)
        max_tokens = message.sampling_params.max_tokens
        wanted = max_model_len if max_tokens is None else self.num_prompt_tokens + max_tokens
        self.max_num_tokens = min(wanted, max_model_len)  # tokens at which it ends
        self.stop_token_ids = frozenset(message.sampling_params.stop_token_ids) | self.active_eos_token_ids
        self.block_root = request_root(message)
        self.extra_inputs = message.extra_inputs  # as ranks get them
        self.adapter = message.adapter
        self.adapter_slot = NO_SLOT  # set by the scheduler before it runs
        self.vision: list[VisionInput] = []
        self.block_keys: BlockKeys = NO_KEYS  # set by the scheduler, which knows the block size
        self.whole_spans = [] if message.extra_inputs is None else message.extra_inputs.whole_spans
        if message.extra_inputs is not None and message.extra_inputs.vision:
            self.vision = message.extra_inputs.vision
            self.extra_inputs = _without_patches(message.extra_inputs)
        self.num_preemptions = self.num_drafts = self.num_accepted_drafts = 0

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def params(self) -> SamplingParams:
        return self.message.sampling_params

    @property
    def arrival_time_s(self) -> float:
        return self.message.arrival_time_s

    @property
    def bad_words_token_ids(self) -> list[list[int]]:
        return self.message.bad_words_token_ids

    @property
    def active_eos_token_ids(self) -> frozenset[int]:
        """EOS tokens that end this request: none with `ignore_eos`."""
        return frozenset() if self.params.ignore_eos else frozenset(self.message.eos_token_ids)

    @property
    def eos_token_ids(self) -> list[int]:
        return self.message.eos_token_ids

    @property
    def may_use_cached_prefix(self) -> bool:
        """Prompt logprobs need the logits of every prompt position, so no part of the prompt may be skipped."""
        return self.params.prompt_logprobs is None

    @property
    def limits_chunks(self) -> bool:
        """Its chunks may have to end before an image."""
        return bool(self.vision or self.whole_spans)

    @property
    def order(self) -> tuple[int, int]:
        """Smallest runs first; the largest running one is preempted first."""
        return self.aged_class, self.arrival_index


def _without_patches(extra: ExtraInputs) -> ExtraInputs:
    vision = [msgspec.structs.replace(image, patches=None, levels=None) for image in extra.vision]
    return msgspec.structs.replace(extra, vision=vision)
