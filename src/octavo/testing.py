"""Test doubles for Octavo and for programs that use it: one-line requests, and a worker without a model.

The fake model is a pure function: the next token is a hash of the context and the request's seed. So the correct output
of every request is known in advance (`expected_tokens`), whatever the schedule. Every slot of the fake KV cache holds
the hash of all tokens up to its position, and every read is checked, so a block that is reused too early or shared
wrongly fails at once.

Legend: R = requests in the step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.drafter import Drafter
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest, ExtraInputs
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import Int32Array, NewRequestData, SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.distributed.rendezvous import Rendezvous
from octavo.sampling_params import RequestPriority, SamplingParams
from octavo.scheduler.block_manager import FULL_ATTENTION, BlockManager
from octavo.scheduler.scheduler import Scheduler

ROOT = 0  # hash of the empty context
_NOTHING_WRITTEN, _LOST = -1, -2


def make_request(
    request_id: str,
    prompt_token_ids: Iterable[int],
    *,
    priority: int = RequestPriority.NORMAL,
    arrival_time_s: float = 0.0,
    eos_token_ids: Iterable[int] = (),
    cache_salt: str | None = None,
    extra_inputs: ExtraInputs | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """Build a request as the input processor would; `params` are those of `SamplingParams`."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling_params=SamplingParams.from_options({"seed": 0, **params}),
        priority=priority,
        arrival_time_s=arrival_time_s,
        eos_token_ids=list(eos_token_ids),
        cache_salt=cache_salt,
        extra_inputs=extra_inputs,
    )


def make_scheduler(
    *,
    num_blocks: int | list[int] = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    ageing_s: float = 30.0,
    step_target_s: float = 0.0,
    enable_prefix_caching: bool = True,
    num_batches: int = 1,
    groups: tuple[KVGroup, ...] = FULL_ATTENTION,
    drafter: Drafter | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Scheduler:
    """Build a small scheduler with its blocks. The clock is constant unless one is given."""
    cache = CacheConfig(
        block_size=block_size,
        num_kv_blocks=None,
        gpu_memory_utilization=None,
        enable_prefix_caching=enable_prefix_caching,
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        ageing_s=ageing_s,
        step_target_s=step_target_s,
    )
    of_groups = num_blocks if isinstance(num_blocks, list) else [num_blocks] * len(groups)
    blocks = BlockManager(cache, of_groups, groups)
    return Scheduler(config, blocks, max_model_len, num_batches=num_batches, drafter=drafter, clock=clock)


def context_hash(context: int, token_id: int) -> int:
    """Return the hash of `context` extended by `token_id`: 63 bits, the same in every process."""
    return hash((context, token_id)) & (2**63 - 1)


def next_token(context: int, seed: int | None, vocab_size: int) -> int:
    """Return the token that follows a context. This is the entire model and sampler."""
    return (hash((context, seed)) >> 7) % vocab_size


def expected_tokens(request: EngineCoreRequest, max_model_len: int, vocab_size: int) -> tuple[list[int], str]:
    """Return the output tokens and the finish reason of `request`, computed alone."""
    params, context = request.sampling_params, ROOT
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
        self._num_known: dict[str, int] = {}  # by request id, when it was last asked about
        self._continuation, self._vocab_size = continuation, vocab_size

    @classmethod
    def of_sequences(cls, sequences: Iterable[Sequence[int]], *, vocab_size: int, max_num_drafts: int = 4) -> Self:
        """Use known sequences, prompts included: a context continues like the first that begins with it."""
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

    def _drafts(self, request_id: str, context: list[int]) -> list[int]:
        right = list(self._continuation(request_id, context))[: self.max_num_drafts]
        num_right = (len(right), 0, len(right) // 2, len(right), 1)[len(context) % 5]
        drafts = right[:num_right] + [(token_id + 1) % self._vocab_size for token_id in right[num_right:]]
        self.num_proposed += len(drafts)
        return drafts if len(context) % 7 else []


class FakeRow:
    """A worker's state of one request, built only from `SchedulerOutput`s."""

    def __init__(self, new: NewRequestData) -> None:
        self.request_id = new.request_id
        self.seed = new.sampling_params.seed
        self.block_ids = [list(table) for table in new.block_ids]  # by KV group
        self.num_tokens = 0
        self.token_ids: list[int] = []  # [num_tokens]
        self.contexts: list[int] = []  # [num_tokens]; entry p is the hash of tokens 0 to p
        for token_id in new.token_ids.tolist():
            self.append(token_id)
        self.num_told = self.num_tokens  # tokens sent to a rank that does not sample
        self.is_lost = False  # depends on KV that a failed step did not write: its samples must never be read

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.contexts.append(context_hash(self.contexts[-1] if self.contexts else ROOT, token_id))
        self.num_tokens += 1

    def truncate(self, num_tokens: int) -> None:
        """Take back draft tokens."""
        del self.contexts[num_tokens:], self.token_ids[num_tokens:]
        self.num_tokens = num_tokens
        self.num_told = min(self.num_told, num_tokens)

    def hear(self, position: int, token_id: int) -> None:
        """Receive a token from the scheduler; a rank that samples already knows it."""
        before = self.contexts[position - 1] if position else ROOT
        is_right = self.contexts[position] == context_hash(before, token_id)
        assert is_right or self.is_lost, f"{self.request_id}: not the sampled token"
        assert position <= self.num_told, f"{self.request_id}: token {self.num_told} was never sent"
        self.num_told = max(self.num_told, position + 1)

    def change(self, group: int, column: int, block_id: int) -> None:
        """Set an entry of a block table; a new one is appended."""
        table = self.block_ids[group]
        assert column <= len(table), f"{self.request_id}: no block for columns before {column}"
        table[column : column + 1] = [block_id]

    def slots(self, group: int, positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
        """Return where a group has the keys and values of `positions`."""
        return np.array(self.block_ids[group])[positions // block_size] * block_size + positions % block_size


class FakeWorker:
    """Executes steps and checks each: a wrong diff, row, block or count is an `AssertionError`."""

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        groups: tuple[KVGroup, ...] = FULL_ATTENTION,
        vocab_size: int = 1000,
        has_first_stage: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._drafter = drafter
        self._has_first_stage = has_first_stage  # must receive every token before it can compute it
        self.num_tokens_computed = 0
        self.rows: dict[int, FakeRow] = {}
        self._block_size = block_size
        self._groups = groups
        self._recurrent = [index for index, group in enumerate(groups) if group.kind == "recurrent"]
        # One block more than managed: the null block, which must never be written or read. A block of a recurrent
        # group has a single entry.
        sizes = [1 if group in self._recurrent else block_size for group in range(len(groups))]
        self._kv: list[NDArray[np.int64]] = [
            np.full((count + 1) * size, _NOTHING_WRITTEN, dtype=np.int64)
            for count, size in zip(num_blocks, sizes, strict=True)
        ]

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        *,
        vocab_size: int = 1000,
        has_first_stage: bool = False,
        drafter: Drafter | None = None,
    ) -> "FakeWorker":
        """Build a worker with as many KV blocks as `scheduler` manages."""
        return cls(
            num_blocks=[pool.num_blocks for pool in scheduler.blocks.pools],
            block_size=scheduler.blocks.block_size,
            groups=scheduler.blocks.groups,
            vocab_size=vocab_size,
            has_first_stage=has_first_stage,
            drafter=drafter,
        )

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Update the rows, write and read all keys and values, and sample."""
        self.update_rows(scheduler_output)
        drafts = self._try_drafts(scheduler_output)
        held = tuple(self.rows[row].request_id for row in scheduler_output.rows.tolist())
        assert held == scheduler_output.req_ids, (
            f"rows hold {held}, the scheduler output names {scheduler_output.req_ids}"
        )
        starts, counts = scheduler_output.num_computed_tokens.tolist(), scheduler_output.num_scheduled_tokens.tolist()
        spans = [
            (self.rows[row], start, start + count)
            for row, start, count in zip(scheduler_output.rows.tolist(), starts, counts, strict=True)
        ]
        self.num_tokens_computed += scheduler_output.total_num_scheduled_tokens
        for row, start, _ in spans:  # states before any is written: rows come in any order
            self._read_states(row, start)
        for row, start, end in spans:
            self._write(row, start, end)
        self._spread_losses(spans)
        for row, start, end in spans:
            self._check_reads(row, start, end)
        sampled = [self._sample(row, end, tried) for (row, _, end), tried in zip(spans, drafts, strict=True)]
        has_sampled = [bool(token_ids) for token_ids in sampled]
        assert has_sampled == scheduler_output.samples.tolist(), f"rows at their last token: {has_sampled}"
        return _answer_of(scheduler_output, sampled, self._proposals([row for row, _, _ in spans], sampled))

    def _proposals(self, rows: list[FakeRow], sampled: list[list[int]]) -> dict[str, list[int]]:
        """Return what a drafter in the rank proposes behind the tokens that rows [R] sampled."""
        if self._drafter is None:
            return {}
        req_ids = [row.request_id for row, token_ids in zip(rows, sampled, strict=True) if token_ids]
        contexts = [np.array(row.token_ids) for row, token_ids in zip(rows, sampled, strict=True) if token_ids]
        return dict(zip(req_ids, map(list, self._drafter.propose(req_ids, contexts)), strict=True))

    def lose(self, scheduler_output: SchedulerOutput) -> None:
        """Fail a step: update the rows but write nothing. Later steps may already be in flight."""
        self.update_rows(scheduler_output)
        drafts = self._try_drafts(scheduler_output)
        ends = scheduler_output.num_computed_tokens + scheduler_output.num_scheduled_tokens  # [R]
        for index, row in enumerate(scheduler_output.rows.tolist()):
            state = self.rows[row]
            state.is_lost = True
            self._write(state, int(scheduler_output.num_computed_tokens[index]), int(ends[index]))
            self._sample(state, int(ends[index]), drafts[index])

    def update_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the diffs of a step to the rows, as every worker does before it computes anything."""
        ended = set(scheduler_output.finished_req_ids)
        self.rows = {row: state for row, state in self.rows.items() if state.request_id not in ended}
        for new in scheduler_output.scheduled_new_reqs:
            assert new.row not in self.rows, f"row {new.row} is taken by {self.rows[new.row].request_id}"
            self.rows[new.row] = FakeRow(new)
        diffs = scheduler_output.scheduled_cached_reqs
        for change in zip(
            *(x.tolist() for x in (diffs.rows, diffs.groups, diffs.columns, diffs.block_ids)), strict=True
        ):
            self.rows[change[0]].change(*change[1:])
        told = zip(diffs.token_rows.tolist(), diffs.token_positions.tolist(), diffs.token_ids.tolist(), strict=True)
        for row, position, token_id in told:
            self.rows[row].hear(position, token_id)

    def _write(self, row: FakeRow, start: int, end: int) -> None:
        assert start < end <= row.num_tokens, f"{row.request_id}: nothing to compute at [{start}, {end})"
        assert end <= row.num_told or not self._has_first_stage, f"{row.request_id}: token {end - 1} was never sent"
        contexts = np.array([_LOST] * row.num_tokens if row.is_lost else row.contexts)
        for group, (kind, kv) in enumerate(zip(self._groups, self._kv, strict=True)):
            size, positions = kind.block_tokens(self._block_size), np.arange(start, end)
            assert end <= len(row.block_ids[group]) * size, f"{row.request_id}: no block for position {end - 1}"
            if group in self._recurrent:
                positions = positions[(positions + 1 == end) | ((positions + 1) % size == 0)]
                slots, null_slot = np.array(row.block_ids[group])[positions // size], len(kv) - 1
            else:
                slots, null_slot = row.slots(group, positions, size), len(kv) - size
            assert (slots < null_slot).all(), f"{row.request_id}: writes to the null block"
            kv[slots] = contexts[positions]

    def _read_states(self, row: FakeRow, start: int) -> None:
        """Check the states that a row begins with, which are those of the token before."""
        for group in self._recurrent if start else ():
            column = (start - 1) // self._groups[group].block_tokens(self._block_size)
            state = self._kv[group][row.block_ids[group][column]]
            row.is_lost |= bool(state == _LOST)
            assert row.is_lost or state == row.contexts[start - 1], f"{row.request_id}: wrong state before {start}"

    def _spread_losses(self, spans: list[tuple[FakeRow, int, int]]) -> None:
        """Mark whatever was computed from lost keys as lost. Repeats, as rows of a step may share blocks."""
        for _ in spans:
            for row, start, end in spans:
                if any(_LOST in found for found, _ in self._reads(row, start, end)):
                    row.is_lost = True
                    self._write(row, start, end)

    def _reads(self, row: FakeRow, start: int, end: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield what each group holds for tokens `start` to `end` - 1 to read, and the position where that begins."""
        for group, (kind, kv) in enumerate(zip(self._groups, self._kv, strict=True)):
            if group not in self._recurrent:
                first = kind.first_read(start)
                yield kv[row.slots(group, np.arange(first, end), self._block_size)], first

    def _check_reads(self, row: FakeRow, start: int, end: int) -> None:
        if row.is_lost:
            return
        for found, first in self._reads(row, start, end):
            wrong = (found != np.array(row.contexts[first:end])).nonzero()[0] + first
            assert not len(wrong), f"{row.request_id}: wrong keys at positions {wrong.tolist()}"

    def _try_drafts(self, scheduler_output: SchedulerOutput) -> list[list[int]]:
        """Append each row's drafts [R] to its tokens, until it has sampled."""
        tried = scheduler_output.scheduled_spec_decode_tokens
        if tried is None:
            return [[] for _ in scheduler_output.req_ids]
        assert int(tried.counts.sum()) == len(tried.token_ids)
        left, drafts = iter(tried.token_ids.tolist()), list[list[int]]()
        for row, count in zip(scheduler_output.rows.tolist(), tried.counts.tolist(), strict=True):
            drafts.append([next(left) for _ in range(count)])
            for token_id in drafts[-1]:
                self.rows[row].append(token_id)
            self.rows[row].num_told += count
        return drafts

    def _sample(self, row: FakeRow, end: int, drafts: list[int]) -> list[int]:
        """Return what the row samples: one token, plus one for each accepted draft."""
        if end < row.num_tokens:
            return []
        row.truncate(row.num_tokens - len(drafts))
        token_ids: list[int] = []
        for draft in [*drafts, None]:
            token_ids.append(next_token(row.contexts[-1], row.seed, self.vocab_size))
            row.append(token_ids[-1])
            if token_ids[-1] != draft:
                break
            row.num_told = row.num_tokens
        return token_ids


def model_output_for(scheduler_output: SchedulerOutput, token_ids: Sequence[int]) -> ModelRunnerOutput:
    """Return the output of a step without drafts: `token_ids` [R], used only for rows that sample."""
    return _answer_of(
        scheduler_output,
        [[one] if it else [] for one, it in zip(token_ids, scheduler_output.samples.tolist(), strict=True)],
    )


def _answer_of(
    scheduler_output: SchedulerOutput,
    sampled: Sequence[Sequence[int]],
    draft_token_ids: Mapping[str, list[int]] = MappingProxyType({}),
) -> ModelRunnerOutput:
    table = np.zeros((len(sampled), max(map(len, sampled), default=1) or 1), dtype=np.int32)
    for row, token_ids in zip(table, sampled, strict=True):
        row[: len(token_ids)] = token_ids
    return ModelRunnerOutput(
        req_ids=scheduler_output.req_ids,
        sampled_token_ids=table,
        num_sampled=np.array([len(token_ids) for token_ids in sampled], dtype=np.int32),
        draft_token_ids=dict(draft_token_ids),
    )


def run_step(scheduler: Scheduler, worker: FakeWorker) -> EngineCoreOutputs:
    """Schedule one step, execute it and update the scheduler with its output."""
    scheduler_output = scheduler.schedule()
    return scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))


class FakeExecutor:
    """An `Executor` without a model. `fails` selects steps that raise instead of computing."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 1000,
        fails: Callable[[SchedulerOutput], bool] = lambda scheduler_output: False,
        max_steps_in_flight: int = 1,
    ) -> None:
        self.max_steps_in_flight = max_steps_in_flight
        self.worker = FakeWorker(num_blocks=[num_blocks], block_size=block_size, vocab_size=vocab_size)
        self.has_exited = False
        self._num_blocks = num_blocks
        self._fails = fails

    @property
    def profile(self) -> str:
        return "fake"

    def start(self) -> list[int]:
        return [self._num_blocks]

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        if self._fails(scheduler_output):
            self.worker.lose(scheduler_output)
            future.set_exception(RuntimeError("failed as requested"))
        else:
            future.set_result(self.worker.execute(scheduler_output))
        return future

    def warmup(self) -> None:
        """No-op: nothing is initialized lazily."""

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """No-op: there are no keys and values."""
        return False

    def check_health(self) -> None:
        """Always healthy."""

    def exit(self) -> None:
        self.has_exited = True


class FakeRank:
    """A `FakeWorker` as a rank of an executor: `MultiprocExecutor(config, "octavo.testing:FakeRank")`."""

    profile = "fake"

    def __init__(self, config: EngineConfig, place: RankPlace, rendezvous: Rendezvous) -> None:
        self.place = place
        self._config = config
        self._worker: FakeWorker | None = None

    def load_model(self) -> None:
        """No-op: there is no model."""

    def count_kv_blocks(self) -> list[int]:
        return [self._config.cache.num_kv_blocks or 64]

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        cache, vocab_size = self._config.cache, self._config.model.vocab_size
        self._worker = FakeWorker(num_blocks=num_blocks, block_size=cache.block_size, vocab_size=vocab_size)

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        done = Future[ModelRunnerOutput]()
        done.set_result(self.execute(scheduler_output))
        return done

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step. Override this to do something else."""
        assert self._worker is not None, "initialize_kv_cache must be called first"
        return self._worker.execute(scheduler_output)

    def warmup(self) -> None:
        """No-op: nothing is initialized lazily."""

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """No-op: there are no keys and values."""
        return False
