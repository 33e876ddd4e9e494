"""One-line requests and schedulers, the tokens that the fake model generates, and a drafter that knows them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.contracts.engine import EngineCoreRequest
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import Int32Array
from octavo.lora.host_cache import HostAdapters
from octavo.sampling_params import RequestPriority, SamplingParams
from octavo.scheduler.adapter_gate import AdapterGate
from octavo.scheduler.block_manager import FULL_ATTENTION, BlockManager
from octavo.scheduler.gate import Gate
from octavo.scheduler.grammar_gate import GrammarGate
from octavo.scheduler.running import RunningRows
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.speculation import Speculation
from octavo.speculative.drafters import Drafter
from octavo.structured.manager import GrammarManager

ROOT = 0  # hash of the empty context
NO_SEED = -1  # Python 3.11 hashes None by its address, which differs between processes


def make_request(request_id: str, prompt_token_ids: Iterable[int], **options: Any) -> EngineCoreRequest:
    """Build a request as the input processor would; `options` are other fields of it, and of its `SamplingParams`."""
    own = {name: options.pop(name) for name in EngineCoreRequest.__struct_fields__ if name in options}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling_params=SamplingParams.from_options({"seed": 0, **options}),
        **{"priority": RequestPriority.NORMAL, "arrival_time_s": 0.0, **own},
    )


def make_scheduler(
    *,
    num_blocks: int | list[int] = 64,
    max_model_len: int = 128,
    num_batches: int = 1,
    grammars: GrammarManager | None = None,
    adapters: HostAdapters | None = None,
    num_adapter_slots: int = 0,
    groups: tuple[KVGroup, ...] = FULL_ATTENTION,
    drafter: Drafter | None = None,
    adapts_drafts: bool = False,
    gates: Sequence[Gate] | Callable[[RunningRows], Sequence[Gate]] = (),
    clock: Callable[[], float] = lambda: 0.0,
    **options: Any,
) -> Scheduler:
    """Build a small scheduler with its blocks; `options` are fields of `CacheConfig` and `SchedulerConfig`.

    The clock is constant unless one is given.
    """
    of_cache: dict[str, Any] = {
        "block_size": 4,
        "num_kv_blocks": None,
        "gpu_memory_utilization": None,
        "enable_prefix_caching": True,
    }
    of_cache |= {name: options.pop(name) for name in of_cache if name in options}
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "ageing_s": 30.0, **options})
    of_groups = num_blocks if isinstance(num_blocks, list) else [num_blocks] * len(groups)
    blocks = BlockManager(CacheConfig(**of_cache), of_groups, groups)
    running = RunningRows(config.max_num_seqs, max_model_len, blocks)
    all_gates: list[Gate] = [grammar_gate := GrammarGate(grammars or GrammarManager(_no_backend), running)]
    if adapters is not None:
        all_gates.append(AdapterGate(adapters, num_adapter_slots, config.ageing_s))
    speculation = None
    if drafter is not None:
        speculation = Speculation(drafter, running, grammar_gate, is_adaptive=adapts_drafts)
    gates = [*all_gates, *(gates(running) if callable(gates) else gates)]
    return Scheduler(config, running, gates=gates, speculation=speculation, num_batches=num_batches, clock=clock)


def _no_backend() -> Any:
    raise AssertionError("this scheduler has no grammars")


def adapter_root(content_hash: str | None) -> int:
    """Return the hash of the empty context under an adapter, by its content hash in hex."""
    return ROOT if content_hash is None else context_hash(ROOT, int(content_hash, 16))


def context_hash(context: int, token_id: int) -> int:
    """Return the hash of `context` extended by `token_id`: 63 bits, the same in every process."""
    return hash((context, token_id)) & (2**63 - 1)


def next_token(context: int, seed: int | None, vocab_size: int) -> int:
    """Return the token that follows a context, the same in every process. This is the entire model and sampler."""
    return (hash((context, NO_SEED if seed is None else seed)) >> 7) % vocab_size


def expected_tokens(request: EngineCoreRequest, max_model_len: int, vocab_size: int) -> tuple[list[int], str]:
    """Return the output tokens and the finish reason of `request`, computed alone."""
    params = request.params
    context = adapter_root(None if request.adapter is None else request.adapter.content_hash)
    for token_id in request.prompt_token_ids:
        context = context_hash(context, token_id)
    room = max_model_len - len(request.prompt_token_ids)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
    token_ids: list[int] = []
    while len(token_ids) < limit:
        token_ids.append(next_token(context, params.seed, vocab_size))
        if token_ids[-1] in stop_ids and len(token_ids) > params.min_tokens:
            return token_ids, "stop"
        context = context_hash(context, token_ids[-1])
    return token_ids, "length"


class KnownDrafter:
    """A `Drafter` that knows how requests continue, and proposes right, wrong, half-right or no tokens in turn.

    `continuation` returns the known tokens after a request's context; wrong ones are off by one.
    """

    def __init__(
        self, continuation: Callable[[str, list[int]], Sequence[int]], *, vocab_size: int, max_num_drafts: int = 4
    ) -> None:
        self.max_num_drafts = max_num_drafts
        self.num_proposed = self.num_accepted = 0
        self._num_known: dict[str, int] = {}  # by request id, at its last call
        self._continuation, self._vocab_size = continuation, vocab_size

    @classmethod
    def of_sequences(cls, sequences: Iterable[Sequence[int]], *, vocab_size: int, max_num_drafts: int = 4) -> Self:
        """Use known sequences, prompts included: a context continues like the first sequence that starts with it."""
        known = [list(sequence) for sequence in sequences]

        def continuation(request_id: str, context: list[int]) -> Sequence[int]:
            size = len(context)
            return next((each[size:] for each in known if len(each) > size and each[:size] == context), ())

        return cls(continuation, vocab_size=vocab_size, max_num_drafts=max_num_drafts)

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[list[int]]:
        for request_id, context in zip(request_ids, contexts, strict=True):
            self.num_accepted += len(context) - self._num_known.get(request_id, len(context) - 1) - 1
            self._num_known[request_id] = len(context)
        return [
            self._drafts(request_id, context.tolist())
            for request_id, context in zip(request_ids, contexts, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        self._num_known.pop(request_id, None)

    def _drafts(self, request_id: str, context: list[int]) -> list[int]:
        right = list(self._continuation(request_id, context))[: self.max_num_drafts]
        num_right = (len(right), 0, len(right) // 2, len(right), 1)[len(context) % 5]
        drafts = right[:num_right] + [(token_id + 1) % self._vocab_size for token_id in right[num_right:]]
        self.num_proposed += len(drafts)
        return drafts if len(context) % 7 else []
