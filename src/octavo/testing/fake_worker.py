"""A worker without a model, which checks every read of its KV cache: in an executor, as a rank, or stepped manually."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace, Rendezvous
from octavo.contracts.engine import AdapterRef, EngineCoreOutputs
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import DRAWN_IN_RANKS, ModelRunnerOutput, NewRequestData, SchedulerOutput
from octavo.contracts.stored import StoreOpened
from octavo.scheduler.block_manager import FULL_ATTENTION
from octavo.scheduler.scheduler import Scheduler
from octavo.speculative.drafters import Drafter
from octavo.testing.requests import adapter_root, context_hash, next_token
from octavo.worker.worker_proc import call_here

_NOTHING_WRITTEN, _LOST = -1, -2
_LOST_ADAPTER = "0"  # in a slot that a failed step did not fill


class FakeRow:
    """A worker's state of one request, built only from `SchedulerOutput`s."""

    def __init__(self, new: NewRequestData, adapter: str | None) -> None:
        self.request_id = new.request_id
        self.adapter_slot = new.adapter_slot
        self.adapter = adapter  # what its slot holds, and must hold until the row is freed
        self.root = adapter_root(adapter)
        self.seed = new.params.seed
        self.block_ids = [list(table) for table in new.block_ids]  # by KV group
        self.num_tokens = 0
        self.token_ids: list[int] = []  # [num_tokens]
        self.contexts = array("q")  # [num_tokens]; entry p is the hash of tokens 0 to p; numpy copies it quickly
        for token_id in new.token_ids.tolist():
            self.append(token_id)
        self.num_received = self.num_tokens  # tokens sent to a rank that does not sample
        self.num_drafts = 0  # of its last step, which end at `last_end`
        self.last_end = 0
        # Depends on what a failed step did not write: its samples must never be read.
        self.is_lost = self.adapter == _LOST_ADAPTER

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.contexts.append(context_hash(self.contexts[-1] if self.contexts else self.root, token_id))
        self.num_tokens += 1

    def truncate(self, num_tokens: int) -> None:
        """Take back draft tokens."""
        del self.contexts[num_tokens:], self.token_ids[num_tokens:]
        self.num_tokens = num_tokens
        self.num_received = min(self.num_received, num_tokens)

    def receive(self, position: int, token_id: int) -> None:
        """Receive a token from the scheduler; a rank that samples already knows it."""
        before = self.contexts[position - 1] if position else self.root
        is_right = self.contexts[position] == context_hash(before, token_id)
        assert is_right or self.is_lost, f"{self.request_id}: not the sampled token"
        assert position <= self.num_received, f"{self.request_id}: token {self.num_received} was never sent"
        self.num_received = max(self.num_received, position + 1)

    def change(self, group: int, column: int, block_id: int) -> None:
        """Set an entry of a block table; a new one is appended."""
        table = self.block_ids[group]
        assert column <= len(table), f"{self.request_id}: no block for columns before {column}"
        table[column : column + 1] = [block_id]

    def slots(self, group: int, positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
        """Return the slots of the keys and values of `positions` in a group."""
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
        self.loaded: set[str] = set()  # adapters in the host cache
        self.slots: dict[int, str] = {}  # adapters on the device
        self._block_size = block_size
        self._groups = groups
        self._recurrent = [index for index, group in enumerate(groups) if group.kind == "recurrent"]
        self._kv: list[NDArray[np.int64]] = []
        self._has_lost = False  # steps have failed, so there may be lost keys
        self.initialize_kv_cache(num_blocks)

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        """Allocate so many blocks of each group, and a null block, which must never be written or read."""
        for group, count in enumerate(num_blocks):
            size = 1 if group in self._recurrent else self._block_size
            self._kv.append(np.full((count + 1) * size, _NOTHING_WRITTEN, dtype=np.int64))

    @classmethod
    def of(cls, scheduler: Scheduler, **options: Any) -> "FakeWorker":
        """Build a worker with as many KV blocks as `scheduler` manages."""
        blocks = scheduler.blocks
        num_blocks = [pool.num_blocks for pool in blocks.pools]
        return cls(num_blocks=num_blocks, block_size=blocks.block_size, groups=blocks.groups, **options)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Update the rows, write and read all keys and values, and sample."""
        for fill in scheduler_output.adapter_fills:
            assert fill.content_hash in self.loaded, f"slot {fill.slot}: its adapter is not in the host cache"
            self.slots[fill.slot] = fill.content_hash
        self.update_rows(scheduler_output)
        drafts = self._try_drafts(scheduler_output)
        held = tuple(self.rows[row].request_id for row in scheduler_output.rows.tolist())
        assert held == scheduler_output.req_ids, f"rows hold {held}, but scheduled are {scheduler_output.req_ids}"
        starts, counts = scheduler_output.num_computed_tokens.tolist(), scheduler_output.num_scheduled_tokens.tolist()
        spans = [
            (self.rows[row], start, start + count)
            for row, start, count in zip(scheduler_output.rows.tolist(), starts, counts, strict=True)
        ]
        self.num_tokens_computed += scheduler_output.total_num_scheduled_tokens
        for row, *_ in spans:
            assert row.is_lost or self.slots.get(row.adapter_slot) == row.adapter, f"{row.request_id}: wrong adapter"
        for (row, start, end), tried in zip(spans, drafts, strict=True):
            self._read_states(row, start)  # all of them before any is written: rows come in any order
            row.num_drafts, row.last_end = len(tried), end
        for row, start, end in spans:
            self._write(row, start, end)
        self._spread_losses(spans)
        for row, start, end in spans:
            for found, first in () if row.is_lost else self._reads(row, start, end):
                wrong = (found != np.array(row.contexts[first:end])).nonzero()[0] + first
                assert not len(wrong), f"{row.request_id}: wrong keys at positions {wrong.tolist()}"
        sampled = [self._sample(row, end, tried) for (row, _, end), tried in zip(spans, drafts, strict=True)]
        has_sampled = [bool(token_ids) for token_ids in sampled]
        assert has_sampled == scheduler_output.samples.tolist(), f"rows at their last token: {has_sampled}"
        return _model_output(scheduler_output, sampled)

    def lose(self, scheduler_output: SchedulerOutput) -> None:
        """Fail a step: update the rows but write nothing, no slot either. Later steps may already be in flight."""
        self._has_lost = True
        self.slots |= dict.fromkeys([fill.slot for fill in scheduler_output.adapter_fills], _LOST_ADAPTER)
        self.update_rows(scheduler_output)
        drafts = self._try_drafts(scheduler_output)
        ends = scheduler_output.num_computed_tokens + scheduler_output.num_scheduled_tokens  # [R]
        for index, row in enumerate(scheduler_output.rows.tolist()):
            state = self.rows[row]
            state.is_lost, state.num_drafts, state.last_end = True, len(drafts[index]), int(ends[index])
            self._write(state, int(scheduler_output.num_computed_tokens[index]), int(ends[index]))
            self._sample(state, int(ends[index]), drafts[index])

    def load_adapter(self, adapter: AdapterRef, evicted: list[str]) -> Future[None]:
        """Drop adapters from the host cache and add another, at once."""
        self.loaded.difference_update(evicted)
        self.loaded.add(adapter.content_hash)
        done = Future[None]()
        done.set_result(None)
        return done

    def warmup(self) -> None:
        """No-op: nothing is initialized lazily."""

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """No-op: there are no keys and values."""
        return False

    def open_block_store(self, number: int, max_bytes: int) -> StoreOpened:
        """Say that nothing is kept on disk."""
        return StoreOpened(state="unsupported", reason="there are no keys and values")

    def close_block_store(self) -> None:
        """No-op: it is not open."""

    def update_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the diffs of a step to the rows, as every worker does before computing."""
        ended = set(scheduler_output.finished_req_ids)
        self.rows = {row: state for row, state in self.rows.items() if state.request_id not in ended}
        for new in scheduler_output.scheduled_new_reqs:
            assert new.row not in self.rows, f"row {new.row} is taken by {self.rows[new.row].request_id}"
            self.rows[new.row] = FakeRow(new, self.slots.get(new.adapter_slot))
        diffs = scheduler_output.scheduled_cached_reqs
        for change in zip(
            *(x.tolist() for x in (diffs.rows, diffs.groups, diffs.columns, diffs.block_ids)), strict=True
        ):
            self.rows[change[0]].change(*change[1:])
        told = zip(diffs.token_rows.tolist(), diffs.token_positions.tolist(), diffs.token_ids.tolist(), strict=True)
        for row, position, token_id in told:
            self.rows[row].receive(position, token_id)

    def _write(self, row: FakeRow, start: int, end: int) -> None:
        assert start < end <= row.num_tokens, f"{row.request_id}: nothing to compute at [{start}, {end})"
        assert end <= row.num_received or not self._has_first_stage, f"{row.request_id}: token {end - 1} was never sent"
        contexts = np.full(end - start, _LOST) if row.is_lost else np.array(row.contexts[start:end])
        for group, (kind, kv) in enumerate(zip(self._groups, self._kv, strict=True)):
            size, positions = kind.block_tokens(self._block_size), np.arange(start, end)
            assert end <= len(row.block_ids[group]) * size, f"{row.request_id}: no block for position {end - 1}"
            if group in self._recurrent:
                known_end, is_last = end - row.num_drafts, (positions + 1) % size == 0
                assert not is_last[positions >= known_end].any(), f"{row.request_id}: a draft ends a block of states"
                positions = positions[(positions + 1 == known_end) | is_last]
                slots, null_slot = np.array(row.block_ids[group])[positions // size], len(kv) - 1
            else:
                slots, null_slot = row.slots(group, positions, size), len(kv) - size
            assert (slots < null_slot).all(), f"{row.request_id}: writes to the null block"
            kv[slots] = contexts[positions - start]

    def _read_states(self, row: FakeRow, start: int) -> None:
        """Check the states that a row starts from: those of the previous token, or of the one before drafts."""
        last = (row.last_end if row.num_drafts else start) - row.num_drafts - 1
        for group in self._recurrent if start else ():
            size = self._groups[group].block_tokens(self._block_size)
            column = (start - 1) // size
            assert column == last // size, f"{row.request_id}: states of {last} and {start - 1} are in different blocks"
            state = self._kv[group][row.block_ids[group][column]]
            row.is_lost |= bool(state == _LOST)
            assert row.is_lost or state == row.contexts[last], f"{row.request_id}: wrong state before {start}"

    def _spread_losses(self, spans: list[tuple[FakeRow, int, int]]) -> None:
        """Mark results computed from lost keys as lost. Repeats, as rows of a step may share blocks."""
        may_spread = self._has_lost
        while may_spread:
            may_spread = False
            for row, start, end in spans:
                if not row.is_lost and any(_LOST in found for found, _ in self._reads(row, start, end)):
                    row.is_lost = may_spread = True
                    self._write(row, start, end)

    def _reads(self, row: FakeRow, start: int, end: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield what tokens `start` to `end` - 1 read from each group, and the position where it starts."""
        for group, (kind, kv) in enumerate(zip(self._groups, self._kv, strict=True)):
            if group not in self._recurrent:
                first = kind.first_read(start)
                yield kv[row.slots(group, np.arange(first, end), self._block_size)], first

    def _try_drafts(self, scheduler_output: SchedulerOutput) -> list[list[int]]:
        """Append each row's drafts [R] to its tokens, until it has sampled."""
        tried = scheduler_output.scheduled_spec_decode_tokens
        if tried is None:
            return [[] for _ in scheduler_output.req_ids]
        assert int(tried.counts.sum()) == len(tried.token_ids)
        left, drafts = iter(tried.token_ids.tolist()), list[list[int]]()
        for row, count in zip(scheduler_output.rows.tolist(), tried.counts.tolist(), strict=True):
            drafts.append(self._filled_in(self.rows[row], [next(left) for _ in range(count)]))
            for token_id in drafts[-1]:
                self.rows[row].append(token_id)
            self.rows[row].num_received += count
        return drafts

    def _filled_in(self, row: FakeRow, drafts: list[int]) -> list[int]:
        """Return a row's drafts. The drafter in the rank fills places, those beyond its proposal with 0."""
        if DRAWN_IN_RANKS not in drafts:
            return drafts
        assert self._drafter is not None, "there is no drafter in this rank"
        assert set(drafts) == {DRAWN_IN_RANKS}, "a row's drafts are given, or all of them are places"
        (proposal,) = self._drafter.propose([row.request_id], [np.array(row.token_ids)])
        return [*proposal, *[0] * len(drafts)][: len(drafts)]

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
            row.num_received = row.num_tokens
        return token_ids


def model_output_for(scheduler_output: SchedulerOutput, token_ids: Sequence[int]) -> ModelRunnerOutput:
    """Return the output of a step without drafts: `token_ids` [R], used only for rows that sample."""
    sampled = [[one] if it else [] for one, it in zip(token_ids, scheduler_output.samples.tolist(), strict=True)]
    return _model_output(scheduler_output, sampled)


def _model_output(scheduler_output: SchedulerOutput, sampled: Sequence[Sequence[int]]) -> ModelRunnerOutput:
    table = np.zeros((len(sampled), max(map(len, sampled), default=1) or 1), dtype=np.int32)
    for row, token_ids in zip(table, sampled, strict=True):
        row[: len(token_ids)] = token_ids
    return ModelRunnerOutput(
        req_ids=scheduler_output.req_ids,
        sampled_token_ids=table,
        num_sampled=np.array([len(token_ids) for token_ids in sampled], dtype=np.int32),
    )


def run_step(scheduler: Scheduler, worker: FakeWorker) -> EngineCoreOutputs:
    """Schedule one step, execute it and update the scheduler with its output."""
    scheduler_output = scheduler.schedule()
    return scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))


class FakeExecutor:
    """An `Executor` without a model. `fails` selects steps that raise instead of computing."""

    profile = "fake"

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

    def call(self, method: str, *arguments: Any) -> Future[list[Any]]:
        return call_here(self.worker, method, arguments)

    def check_health(self) -> None:
        """Always healthy."""

    def exit(self) -> None:
        self.has_exited = True


class FakeRank(FakeWorker):
    """A `FakeWorker` as a rank of an executor: `MultiprocExecutor(config, "octavo.testing:FakeRank")`.

    Override `execute` to do something else in a step.
    """

    profile = "fake"

    def __init__(self, config: EngineConfig, place: RankPlace, rendezvous: Rendezvous) -> None:
        super().__init__(num_blocks=[], block_size=config.cache.block_size, vocab_size=config.model.vocab_size)
        self.place = place
        self._num_blocks = config.cache.num_kv_blocks or 64

    def load_model(self) -> None:
        """No-op: there is no model."""

    def count_kv_blocks(self) -> list[int]:
        return [self._num_blocks]

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        done = Future[ModelRunnerOutput]()
        done.set_result(self.execute(scheduler_output))
        return done
