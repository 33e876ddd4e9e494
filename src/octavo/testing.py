"""Test doubles for Octavo itself and for programs around it: requests in one line, and a worker without a model.

The worker's model is a pure function: the token that follows a context is a hash of that context and the request's
seed. So the right answer of every request is known beforehand (`expected_tokens`), whatever the schedule was. Its KV
memory holds, in every slot, the hash of all tokens up to that position; what a step reads is compared with what
should be there, so a block that was reused too early or shared wrongly is an error at once.

Legend: R = requests in the step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import NewRequestData, SchedulerOutput
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
    **params: Any,
) -> EngineCoreRequest:
    """Build a request as the front door would; `params` go to `SamplingParams`."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling_params=SamplingParams.from_options({"seed": 0, **params}),
        priority=priority,
        arrival_time_s=arrival_time_s,
        eos_token_ids=list(eos_token_ids),
        cache_salt=cache_salt,
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
    clock: Callable[[], float] = lambda: 0.0,
) -> Scheduler:
    """Build a small scheduler with its blocks. Time stands still unless a clock is given."""
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
    return Scheduler(config, blocks, max_model_len, num_batches=num_batches, clock=clock)


def context_hash(context: int, token_id: int) -> int:
    """Return the hash of a context that goes on with `token_id`. 63 bits, the same in every process."""
    return hash((context, token_id)) & (2**63 - 1)


def next_token(context: int, seed: int | None, vocab_size: int) -> int:
    """Return the token that follows a context: the whole of the model and the sampler."""
    return (hash((context, seed)) >> 7) % vocab_size


def expected_tokens(request: EngineCoreRequest, max_model_len: int, vocab_size: int) -> tuple[list[int], str]:
    """Return the output tokens and the finish reason of `request` when it runs alone."""
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


class FakeRow:
    """What a worker keeps of one request, built from nothing but `SchedulerOutput`s."""

    def __init__(self, new: NewRequestData) -> None:
        self.request_id = new.request_id
        self.seed = new.sampling_params.seed
        self.block_ids = [list(table) for table in new.block_ids]  # by KV group
        self.num_tokens = 0
        self.contexts: list[int] = []  # [num_tokens]; entry p is the hash of tokens 0 to p
        for token_id in new.token_ids.tolist():
            self.append(token_id)
        self.num_told = self.num_tokens  # of which a rank knows that does not sample
        self.is_lost = False  # it builds on what a failed step did not write: nobody must read what it samples

    def append(self, token_id: int) -> None:
        self.contexts.append(context_hash(self.contexts[-1] if self.contexts else ROOT, token_id))
        self.num_tokens += 1

    def hear(self, position: int, token_id: int) -> None:
        """Take in a token that the order tells; a rank that samples knows it already."""
        before = self.contexts[position - 1] if position else ROOT
        is_right = self.contexts[position] == context_hash(before, token_id)
        assert is_right or self.is_lost, f"{self.request_id}: not what was sampled"
        assert position <= self.num_told, f"{self.request_id}: no order told token {self.num_told}"
        self.num_told = max(self.num_told, position + 1)

    def change(self, group: int, column: int, block_id: int) -> None:
        """Write an entry of a block table; a new one comes at its end."""
        table = self.block_ids[group]
        assert column <= len(table), f"{self.request_id}: no block for columns before {column}"
        table[column : column + 1] = [block_id]

    def slots(self, group: int, start: int, end: int, block_size: int) -> NDArray[np.int64]:
        """Return where a group has the keys and values of positions `start` to `end` - 1."""
        positions = np.arange(start, end)
        return np.array(self.block_ids[group])[positions // block_size] * block_size + positions % block_size


class FakeWorker:
    """Carries out steps in order and checks each: a wrong diff, row, block or count is an `AssertionError`."""

    def __init__(
        self,
        *,
        num_blocks: list[int],
        block_size: int,
        groups: tuple[KVGroup, ...] = FULL_ATTENTION,
        vocab_size: int = 1000,
        has_first_stage: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self._has_first_stage = has_first_stage  # one that must be told every token before it can compute it
        self.num_tokens_computed = 0
        self.rows: dict[int, FakeRow] = {}
        self._block_size = block_size
        self._groups = groups
        # One block more than there are, which is nobody's and must never be written or read.
        sizes = [(count + 1) * block_size for count in num_blocks]
        self._kv: list[NDArray[np.int64]] = [np.full(size, _NOTHING_WRITTEN, dtype=np.int64) for size in sizes]

    @classmethod
    def of(cls, scheduler: Scheduler, *, vocab_size: int = 1000, has_first_stage: bool = False) -> "FakeWorker":
        """Build a worker with as much KV memory as `scheduler` hands out."""
        return cls(
            num_blocks=[pool.num_blocks for pool in scheduler.blocks.pools],
            block_size=scheduler.blocks.block_size,
            groups=scheduler.blocks.groups,
            vocab_size=vocab_size,
            has_first_stage=has_first_stage,
        )

    def execute(self, order: SchedulerOutput) -> ModelRunnerOutput:
        """Update the rows, write all keys and values, read them, and sample."""
        self.update_rows(order)
        held = tuple(self.rows[row].request_id for row in order.rows.tolist())
        assert held == order.req_ids, f"the rows are those of {held}, the order means {order.req_ids}"
        starts, counts = order.num_computed_tokens.tolist(), order.num_scheduled_tokens.tolist()
        spans = [
            (self.rows[row], start, start + count)
            for row, start, count in zip(order.rows.tolist(), starts, counts, strict=True)
        ]
        self.num_tokens_computed += order.total_num_scheduled_tokens
        for row, start, end in spans:
            self._write(row, start, end)
        self._spread_losses(spans)
        for row, start, end in spans:
            self._check_reads(row, start, end)
        sampled = [self._sample(row, end) for row, _, end in spans]
        has_sampled = [token_id is not None for token_id in sampled]
        assert has_sampled == order.samples.tolist(), f"rows at their last token: {has_sampled}"
        return answer_to(order, [token_id or 0 for token_id in sampled])

    def lose(self, order: SchedulerOutput) -> None:
        """Fail a step: the rows are brought up to date, nothing is written. Steps behind it may be on their way."""
        self.update_rows(order)
        ends = order.num_computed_tokens + order.num_scheduled_tokens  # [R]
        for index, row in enumerate(order.rows.tolist()):
            state = self.rows[row]
            state.is_lost = True
            self._write(state, int(order.num_computed_tokens[index]), int(ends[index]))
            self._sample(state, int(ends[index]))

    def update_rows(self, order: SchedulerOutput) -> None:
        """Bring the rows up to date: what every worker does with a step before it computes anything."""
        ended = set(order.finished_req_ids)
        self.rows = {row: state for row, state in self.rows.items() if state.request_id not in ended}
        for new in order.scheduled_new_reqs:
            assert new.row not in self.rows, f"row {new.row} is taken by {self.rows[new.row].request_id}"
            self.rows[new.row] = FakeRow(new)
        diffs = order.scheduled_cached_reqs
        for change in zip(
            *(x.tolist() for x in (diffs.rows, diffs.groups, diffs.columns, diffs.block_ids)), strict=True
        ):
            self.rows[change[0]].change(*change[1:])
        told = zip(diffs.token_rows.tolist(), diffs.token_positions.tolist(), diffs.token_ids.tolist(), strict=True)
        for row, position, token_id in told:
            self.rows[row].hear(position, token_id)

    def _write(self, row: FakeRow, start: int, end: int) -> None:
        assert start < end <= row.num_tokens, f"{row.request_id}: nothing to compute at [{start}, {end})"
        assert end <= row.num_told or not self._has_first_stage, f"{row.request_id}: token {end - 1} was not told"
        for group, kv in enumerate(self._kv):
            room = len(row.block_ids[group]) * self._block_size
            assert end <= room, f"{row.request_id}: no block for position {end - 1}"
            slots = row.slots(group, start, end, self._block_size)
            assert (slots < len(kv) - self._block_size).all(), f"{row.request_id}: writes to nobody's block"
            kv[slots] = _LOST if row.is_lost else row.contexts[start:end]

    def _spread_losses(self, spans: list[tuple[FakeRow, int, int]]) -> None:
        """What was made from lost keys is lost itself: by turns, as rows of one step may share blocks."""
        for _ in spans:
            for row, start, end in spans:
                if any(_LOST in found for found, _ in self._reads(row, start, end)):
                    row.is_lost = True
                    self._write(row, start, end)

    def _reads(self, row: FakeRow, start: int, end: int) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield what each group has for tokens `start` to `end` - 1 to read, and the position where that begins."""
        for group, (kind, kv) in enumerate(zip(self._groups, self._kv, strict=True)):
            first = kind.first_read(start)
            yield kv[row.slots(group, first, end, self._block_size)], first

    def _check_reads(self, row: FakeRow, start: int, end: int) -> None:
        if row.is_lost:
            return
        for found, first in self._reads(row, start, end):
            wrong = (found != np.array(row.contexts[first:end])).nonzero()[0] + first
            assert not len(wrong), f"{row.request_id}: wrong keys at positions {wrong.tolist()}"

    def _sample(self, row: FakeRow, end: int) -> int | None:
        if end < row.num_tokens:
            return None
        token_id = next_token(row.contexts[-1], row.seed, self.vocab_size)
        row.append(token_id)
        return token_id


def answer_to(order: SchedulerOutput, token_ids: Sequence[int]) -> ModelRunnerOutput:
    """Answer a step: `token_ids` [R], of which only those of rows that sample count."""
    return ModelRunnerOutput(
        req_ids=order.req_ids,
        sampled_token_ids=np.array(token_ids, dtype=np.int32).reshape(-1, 1),
        num_sampled=order.samples.astype(np.int32),
    )


def run_step(scheduler: Scheduler, worker: FakeWorker) -> EngineCoreOutputs:
    """Schedule a step, carry it out and book its answer."""
    order = scheduler.schedule()
    return scheduler.update_from_output(order, worker.execute(order))


class FakeExecutor:
    """An `Executor` without a model, for engines under test. `fails` says which steps raise instead of computing."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 1000,
        fails: Callable[[SchedulerOutput], bool] = lambda order: False,
        most_steps_in_flight: int = 1,
    ) -> None:
        self.most_steps_in_flight = most_steps_in_flight
        self.worker = FakeWorker(num_blocks=[num_blocks], block_size=block_size, vocab_size=vocab_size)
        self.has_exited = False
        self._num_blocks = num_blocks
        self._fails = fails

    @property
    def profile(self) -> str:
        return "fake"

    def start(self) -> list[int]:
        return [self._num_blocks]

    def execute_model(self, order: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        if self._fails(order):
            self.worker.lose(order)
            future.set_exception(RuntimeError("the forward was told to fail"))
        else:
            future.set_result(self.worker.execute(order))
        return future

    def warmup(self) -> None:
        """Nothing is lazy here."""

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """It keeps no keys and values."""
        return False

    def check_health(self) -> None:
        """Always well."""

    def exit(self) -> None:
        self.has_exited = True


class FakeRank:
    """A `FakeWorker` where an executor expects a rank: `MultiprocExecutor(config, "octavo.testing:FakeRank")`."""

    profile = "fake"

    def __init__(self, config: EngineConfig, place: RankPlace, rendezvous: Rendezvous) -> None:
        self.place = place
        self._config = config
        self._worker: FakeWorker | None = None

    def load_model(self) -> None:
        """There is none."""

    def count_kv_blocks(self) -> list[int]:
        return [self._config.cache.num_kv_blocks or 64]

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        cache, vocab_size = self._config.cache, self._config.model.vocab_size
        self._worker = FakeWorker(num_blocks=num_blocks, block_size=cache.block_size, vocab_size=vocab_size)

    def execute_model(self, order: SchedulerOutput) -> ModelRunnerOutput:
        assert self._worker is not None, "initialize_kv_cache comes first"
        return self._worker.execute(order)

    def warmup(self) -> None:
        """Nothing is lazy here."""

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """It keeps no keys and values."""
        return False
