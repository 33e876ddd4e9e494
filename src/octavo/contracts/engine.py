"""Messages between the frontend (text) and the engine core (tokens). Encoded with msgspec between processes.

Outputs are columns rather than one object per request: with thousands of running requests, the objects would cost more
than scheduling. Legend: R = requests with new output in this step.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.sampling_params import NO_SAMPLING, SamplingParams


class EmbeddingSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings that replace those of some prompt tokens: an image's, for instance."""

    start: int  # position of the first
    num_tokens: int
    embeddings: bytes  # [num_tokens, hidden size] float32


class VisionInput(msgspec.Struct, frozen=True, kw_only=True):
    """An image or a video in a prompt, as the processor prepared it for the model's vision tower."""

    start: int  # position of its first token
    num_tokens: int
    grid: tuple[int, int, int]  # (pairs of) frames, rows and columns of patches
    content_hash: str  # of patches, levels and grid, and of what else the rotary positions depend on
    patches: NDArray[Any] | None = None  # [frames * rows * columns, values of a patch]; None: sent separately
    levels: NDArray[np.float32] | None = None  # [channels, 256], of patches of uint8; None: patches are float32

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens


class ExtraInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a request in addition to its tokens; each is absent unless used. Part of its block hashes.

    With `vision`, rotary positions and whole spans follow from it and the tokens.
    """

    rotary_positions: bytes | None = None  # [3, prompt] int32: positions for multimodal rotary embeddings
    embedding_spans: list[EmbeddingSpan] = []
    vision: list[VisionInput] = []  # in the order of the prompt
    whole_spans: list[tuple[int, int]] = []  # [start, end) of tokens that attend to each other: never cut by a step
    has_short_angles: bool = False  # prompt and answer stay within the first range of LongRoPE
    second_text: int | None = None  # position of the first token that belongs to the second text of a pair

    @property
    def num_images(self) -> int:
        """Images and videos in the prompt."""
        return len(self.vision) + len(self.embedding_spans)


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a request. Its configuration has been read and checked against `max_lora_rank`."""

    name: str  # for messages to people
    path: str  # a folder in PEFT's format, on every host that has ranks
    content_hash: str  # SHA-256 of the configuration's and the weights' bytes, in hex
    rank: int  # the largest of any of its layers


class PoolingTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the vector of a request without sampling parameters is made of.

    last, mean, cls: hidden states, then what the model does with the result; labels: logarithms of the probabilities of
    `token_ids` as the next token.
    """

    kind: Literal["last", "mean", "cls", "labels"] = "last"
    token_ids: list[int] = []

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether no part of the prompt may be skipped."""
        return self.kind in ("mean", "cls")


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate, or a vector. Sent once, already validated; contains tokens, never text.

    With `resumed_token_ids` it goes on as if it had never stopped: noise, penalties, limits, grammar and the indices of
    outputs count them, and none of them is sent again.
    """

    request_id: str
    prompt_token_ids: list[int]
    resumed_token_ids: list[int] = []  # output it already has, from an engine that died: it goes on after these
    sampling_params: SamplingParams | None  # `seed` and `max_tokens` are set. None: the answer is a pooled vector
    pooling: PoolingTask = PoolingTask()  # of such an answer
    priority: int
    arrival_time_s: float
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    cache_salt: str | None = None  # requests with different salts (tenants) never share KV blocks
    extra_inputs: ExtraInputs | None = None
    adapter: AdapterRef | None = None  # None: the base model

    @property
    def prefix_keys(self) -> list[str]:
        """What its keys and values depend on besides tokens and images, or must not be shared across."""
        keys = [] if self.cache_salt is None else ["salt", self.cache_salt]
        if self.adapter is not None:
            keys += ["adapter", self.adapter.content_hash]  # the same under two names or from two folders
        if (extra := self.extra_inputs) is None:
            return keys
        if extra.vision:  # in the keys of the blocks that have tokens of images
            extra = msgspec.structs.replace(extra, vision=[])
            if not extra.embedding_spans:  # the rest follows from the images and tokens
                extra = ExtraInputs()
        if extra != ExtraInputs():
            keys += ["inputs", hashlib.sha256(msgspec.msgpack.encode(extra)).hexdigest()]
        return keys

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether hidden states of all of its prompt are needed, so that no prefix of it may be found in a cache."""
        if self.sampling_params is None:
            return self.pooling.reads_whole_prompt
        return self.sampling_params.prompt_logprobs is not None

    @property
    def is_prepared(self) -> bool:
        """Whether the core does something for it before its first step: compiles a grammar, loads an adapter."""
        return self.adapter is not None or self.params.structured_output is not None

    @property
    def params(self) -> SamplingParams:
        """Those that count tokens; `NO_SAMPLING` of a request that is pooled."""
        return self.sampling_params or NO_SAMPLING


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position: of the actual token first, then of the top tokens in descending order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the actual token; 1 is the most likely


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended."""

    finish_reason: str  # `stop`, `length`, `abort` or `error`
    stop_token_id: int | None = None  # set if one of the request's own stop_token_ids ended it
    error: str | None = None
    num_preemptions: int = 0
    num_drafts: int = 0  # speculated tokens that were verified
    num_accepted_drafts: int = 0
    error_type: str | None = None  # the class of `error` in `octavo.errors`, if any
    shows_last_token: bool = False  # with `stop`: the last token is part of the text and completes the constraint

    @property
    def counts(self) -> dict[str, int]:
        """What was counted, by fields of `RequestMetrics`."""
        return {name: getattr(self, name) for name in ("num_preemptions", "num_drafts", "num_accepted_drafts")}


class AdmittedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sent with a request's first scheduled step."""

    scheduled_time_s: float
    num_cached_tokens: int


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Totals count from the start of the core and are all that remains after it has ended."""

    num_running: int = 0
    num_waiting: int = 0
    deferred: dict[str, int] = {}  # of the waiting ones, those that a gate holds, by its reason
    num_free_blocks: int = 0
    num_blocks: int = 0  # at least 1 while the core is alive
    num_preemptions_total: int = 0
    num_prefix_queries_total: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hits_total: int = 0  # prompt tokens found in the prefix cache
    num_prefix_disk_hits_total: int = 0  # of these, prompt tokens that were read from disk for a request
    num_prefix_disk_saved_total: int = 0  # KV blocks written to disk
    prefix_disk_bytes: int = 0  # of KV blocks on disk
    prefix_disk_failures: dict[str, int] = {}  # blocks or files that were not used, by what was wrong
    step_s_total: float = 0.0  # of steps whose native calls are timed: while there is work, from output to output
    compute_s_total: float = 0.0  # of these, in native calls; the rest is the host's, not hidden behind them

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def ended(self) -> "SchedulerStats":
        """Return what remains after the core has ended: the totals."""
        return msgspec.structs.replace(self, num_running=0, num_waiting=0, deferred={}, num_free_blocks=0, num_blocks=0)

    @classmethod
    def sum(cls, parts: Iterable["SchedulerStats"]) -> "SchedulerStats":
        """Return the combined statistics of several cores."""
        of_parts = [msgspec.structs.asdict(part) for part in parts]
        deferred, failures = Counter[str](), Counter[str]()
        for each in of_parts:
            deferred.update(each.pop("deferred"))
            failures.update(each.pop("prefix_disk_failures"))
        dicts: dict[str, Any] = {"deferred": dict(deferred), "prefix_disk_failures": dict(failures)}
        return cls(**dicts, **{name: sum(each[name] for each in of_parts) for name in of_parts[0]})


class SpecDecodeStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts verified and accepted since the start, by their position after the last known token."""

    proposed: list[int]
    accepted: list[int]
    draft_s: float = 0.0  # that a draft model took

    @property
    def num_drafts(self) -> int:
        """How often a request got at least one draft in a step."""
        return self.proposed[0]

    @classmethod
    def sum(cls, parts: Sequence["SpecDecodeStats"]) -> "SpecDecodeStats":
        """Return the combined counts of several cores with the same settings."""
        columns = [(part.proposed, part.accepted) for part in parts]
        proposed, accepted = ([sum(at) for at in zip(*lists, strict=True)] for lists in zip(*columns, strict=True))
        return cls(proposed=proposed, accepted=accepted, draft_s=sum(part.draft_s for part in parts))


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens routed to each expert since the start, except shared experts. Raw bytes, as there may be thousands."""

    layers: list[int]  # the MoE layers of the stage that replies
    counts: bytes  # [layers, experts] int64, native byte order

    @classmethod
    def sum(cls, parts: Sequence["ExpertLoad"]) -> "ExpertLoad":
        """Return the combined counts of several cores of one model."""
        counts = np.sum([np.frombuffer(part.counts, dtype=np.int64) for part in parts], axis=0)
        return cls(layers=parts[0].layers, counts=counts.tobytes())

    def of_layers(self) -> dict[int, list[int]]:
        """Return the token counts of each expert, by layer."""
        counts = memoryview(self.counts).cast("q").tolist()
        num_experts = len(counts) // len(self.layers)
        return {layer: counts[at * num_experts : (at + 1) * num_experts] for at, layer in enumerate(self.layers)}


class AdapterEvents(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened in the host caches since the last report, by the adapters' names."""

    loads: dict[str, int] = {}
    evictions: dict[str, int] = {}


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The new output of one step.

    `new_token_ids` is flat: `num_new_tokens[i]` of its tokens belong to `req_ids[i]`, and the first of these is output
    token number `first_indices[i]` of that request, so a replay can never duplicate a token.
    """

    req_ids: list[str] = []  # [R]
    num_new_tokens: list[int] = []  # [R]
    first_indices: list[int] = []  # [R]
    new_token_ids: list[int] = []  # [sum(num_new_tokens)]
    num_scheduled_tokens: int = 0  # computed in this step, including prompt tokens
    admitted: dict[str, AdmittedRequest] = {}
    prefilled: dict[str, int] = {}  # tokens of its context so far, of a request whose context needs more steps
    finished: dict[str, FinishedRequest] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}  # one entry for each new token of the request
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # whole prompt at once; [0] is None
    pooled: dict[str, bytes] = {}  # float32 each, of requests without sampling parameters: see `PoolingTask`
    stats: SchedulerStats | None = None
    expert_load: ExpertLoad | None = None
    spec_decode: SpecDecodeStats | None = None  # of an engine with a drafter
    adapter_events: AdapterEvents | None = None
    num_deaths: int = 0  # cores that have died since the last outputs; their requests go on
    replica: int = 0  # index of the engine core under data parallelism; set by the client that merges them


class AddRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Queue validated requests."""

    requests: list[EngineCoreRequest]


class CallMethod(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call a method of the core whose arguments and result are plain values."""

    call_id: int | None  # None: nobody waits for a `CallResult`
    method: str
    arguments: list[Any] = []


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Exit with code 0 without finishing running requests."""


ToCore = AddRequests | CallMethod | Shutdown


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded. Messages sent earlier are kept."""

    profile: str  # device, dtype and kernels: everything the exact bits of an output depend on
    kv_tokens: int  # of full-length requests, that the KV cache holds
    stats: SchedulerStats = SchedulerStats()  # before the first step


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core could not start or cannot continue. `error_type` is the name of any exception class."""

    error_type: str
    message: str


class CallResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A method of the core has returned `value`, or raised an error of a class in `octavo.errors`."""

    call_id: int
    value: Any = None
    error_type: str | None = None
    error: str = ""


FromCore = EngineCoreOutputs | CoreReady | CoreFailed | CallResult
