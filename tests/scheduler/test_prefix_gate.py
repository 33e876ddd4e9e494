"""Random schedules with a slow, faulty disk: every request still gets the tokens that it would get alone.

The disk does what it is told in order with the steps, and ends it when the test says so. What it holds survives: each
schedule is followed by another one, of a new engine with the same geometry.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.breadth import pick
from tests.scheduler.test_random_schedules import Choices, Drill

from octavo.contracts.stored import BlocksWritten, StoreOpened
from octavo.scheduler.gate import Gate
from octavo.scheduler.prefix_gate import PrefixGate
from octavo.scheduler.prefix_store import PrefixStore
from octavo.scheduler.running import RunningRows
from octavo.testing import FakeWorker, make_request, make_scheduler, run_step

GEOMETRY_BYTES = 40  # of a schedule: more than a drill reads to build its engine
GARBAGE = -3
Place = tuple[int, int]  # group, slot
Content = tuple[bytes, NDArray[np.int64]]


class Disk(dict[Place, Content]):
    """Blocks by their place. `broken` ones cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[Place] = set()


class DiskDrill(Drill):
    longest_share = 0.9
    num_popped = 0  # steps that are not in flight any more

    def __init__(self, choices: Choices, disk: Disk) -> None:
        self.disk = disk
        self.orders: deque[tuple[int, Callable[[], None]]] = deque()  # not begun; number of steps sent before each
        self.writes: deque[Callable[[], None]] = deque()  # not ended
        self.reads: list[Callable[[], None]] = []
        self.num_sent = 0
        self.done: Counter[str] = Counter()
        super().__init__(choices)
        self.prefixes.is_unsure = self.scheduler.is_in_flight

    def more_gates(self, running: RunningRows) -> list[Gate]:
        blocks = running.blocks
        num_bytes = sum(pool.num_blocks for pool in blocks.pools) * (2 + self.choices.below(4)) // 2
        self.prefixes = PrefixStore(self.call, blocks, num_bytes)  # a block takes a byte
        self.gate = PrefixGate(self.prefixes, running)
        if blocks.enable_prefix_caching:
            self.prefixes.open()
        return [self.gate] if self.prefixes.is_open else []

    # -- the ranks' side ------------------------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        if method == "open_block_store":
            num_groups = len(self.prefixes._blocks.pools)
            found = [
                [(place[1], self.disk[place][0]) for place in self.disk if place[0] == g] for g in range(num_groups)
            ]
            future.set_result([StoreOpened(state="open", slot_bytes=[1] * num_groups, found=found)])
        elif method in ("limit_block_store", "close_block_store"):
            future.set_result([None])
        else:
            begin: dict[str, Callable[..., None]]
            begin = {"save_blocks": self.begin_save, "read_blocks": self.begin_read, "drop_blocks": self.begin_drop}
            self.orders.append((self.num_sent, lambda: begin[method](future, *arguments)))
            self.begin_orders()
        return future

    def begin_orders(self) -> None:
        """Begin what was sent before the next step that is not executed."""
        in_flight = list(self.in_flight)[: self.num_sent - self.num_popped] if self.num_sent else []
        num_executed = self.num_sent - sum(step.model_output is None for step in in_flight)
        while self.orders and self.orders[0][0] <= num_executed:
            self.orders.popleft()[1]()

    def memory(self, group: int, block_id: int) -> NDArray[np.int64]:
        worker, kind = self.worker, self.scheduler.blocks.groups[group]
        size = 1 if kind.kind == "recurrent" else self.scheduler.blocks.block_size
        return worker._kv[group][block_id * size : (block_id + 1) * size]

    def begin_save(self, future: Future[Any], groups: Any, block_ids: Any, slots: Any, hashes: Any) -> None:
        copies = [self.memory(group, block_id).copy() for group, block_id in zip(groups, block_ids, strict=True)]

        def end() -> None:
            for group, slot, block_hash, copied in zip(groups, slots, hashes, copies, strict=True):
                self.disk[group, slot] = block_hash, copied
                self.disk.broken.discard((group, slot))
            self.done["saved"] += len(slots)
            future.set_result([BlocksWritten(took_s=0.0)])

        self.writes.append(end)

    def begin_read(self, future: Future[Any], groups: Any, block_ids: Any, slots: Any, hashes: Any) -> None:
        for group, block_id in zip(groups, block_ids, strict=True):
            self.memory(group, block_id)[:] = GARBAGE

        def end() -> None:
            failed = []
            for index, (group, block_id, slot, block_hash) in enumerate(
                zip(groups, block_ids, slots, hashes, strict=True)
            ):
                found, content = self.disk.get((group, slot), (b"", -1))
                if found != block_hash or (group, slot) in self.disk.broken:
                    failed.append((index, "damaged"))
                else:
                    self.memory(group, block_id)[:] = content
            self.done["read"] += len(slots) - len(failed)
            self.done["failed"] += len(failed)
            future.set_result([failed])

        self.reads.append(end)

    def begin_drop(self, future: Future[Any], groups: Any, slots: Any) -> None:
        def end() -> None:
            for place in zip(groups, slots, strict=True):
                self.disk.pop(place, None)
            future.set_result([None])

        self.writes.append(end)

    # -- what may happen ------------------------------------------------------------------------------------------

    def act(self) -> None:
        if self.choices.one_in(4):
            actions = [self.end_write, self.end_write, self.end_read, self.be_idle, self.be_idle, self.break_one]
            actions += [self.lose_memory] * 2
            actions[self.choices.below(len(actions))]()
            self.scheduler.check_integrity()
        else:
            super().act()

    def end_write(self) -> None:
        if self.writes:
            self.writes.popleft()()

    def end_read(self) -> None:
        if self.reads:
            self.reads.pop(self.choices.below(len(self.reads)))()

    def be_idle(self) -> None:
        if not self.in_flight and self.prefixes.is_open:
            self.gate.poll()
            self.prefixes._settle()
            self.prefixes._write(self.prefixes._take_waiting(9))

    def break_one(self) -> None:
        if self.disk:
            self.disk.broken.add(sorted(self.disk)[self.choices.below(len(self.disk))])

    def lose_memory(self) -> None:
        """Forget what is in memory, as if others had needed it."""
        for pool in self.scheduler.blocks.pools:
            told, pool.on_forgotten = pool.on_forgotten, None
            pool.forget_hashes(range(pool.num_blocks))
            pool.on_forgotten = told

    def schedule(self) -> None:
        super().schedule()
        if self.prefixes.is_open:
            self.prefixes.save_evicted()
        self.num_sent = self.num_popped + len(self.in_flight)

    def execute(self) -> None:
        super().execute()
        self.begin_orders()

    def update(self) -> None:
        before = len(self.in_flight)
        super().update()
        self.num_popped += before - len(self.in_flight)
        self.begin_orders()
        if self.prefixes.is_open and not self.in_flight:
            self.prefixes.after_step(100)

    def fail_step(self) -> None:
        before = len(self.in_flight)
        super().fail_step()
        self.num_popped += before - len(self.in_flight)
        self.begin_orders()

    def load(self) -> None:
        super().load()
        self.end_write()
        self.end_read()

    def check_the_end(self) -> None:
        while self.orders or self.writes or self.reads:
            self.begin_orders()
            self.end_write()
            self.end_read()
        self.gate.poll()
        super().check_the_end()
        assert not self.gate.owned_blocks
        self.scheduler.check_integrity()


def run_twice(data: bytes) -> list[DiskDrill]:
    """Run a schedule, and another one after a restart with what is on the disk then."""
    disk, drills = Disk(), []
    half = GEOMETRY_BYTES + (len(data) - GEOMETRY_BYTES) // 2
    for actions in (data[GEOMETRY_BYTES:half], data[half:]):
        choices = Choices(data[:GEOMETRY_BYTES] + actions)
        drill = DiskDrill(choices, disk)
        while choices:
            drill.act()
        drill.run_to_the_end()
        drill.check_the_end()
        drills.append(drill)
    return drills


@pytest.mark.parametrize("first_seed", range(0, pick(20, 2000), 20))
def test_every_request_gets_its_own_tokens(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + pick(8, 20)):
        run_twice(random.Random(seed).randbytes(400 + 40 * seed % 1200))


@pytest.mark.parametrize("seed", pick([20341], [10002, 20056, 20341, 20346, 20517]))
def test_schedules_that_failed_once(seed: int) -> None:
    """Blocks of an aborted request that nobody gave back; a slot that was written while it was to be read."""
    run_twice(random.Random(seed).randbytes(400 + seed % 1500))


def test_the_schedules_are_worth_their_time() -> None:
    drills = [drill for seed in range(3, 9) for drill in run_twice(random.Random(seed).randbytes(2000))]
    done = sum((drill.done for drill in drills), start=Counter[str]())
    hits = sum(drill.scheduler.stats().num_prefix_disk_hits_total for drill in drills)
    assert min(done["saved"], 20 * done["read"], 10 * hits, 200 * done["failed"]) > 400, (done, hits)


def test_ranks_that_keep_nothing_are_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def call(method: str, *arguments: Any) -> Future[list[Any]]:
        calls.append(method)
        future: Future[list[Any]] = Future()
        future.set_result([StoreOpened(state="unsupported", reason="no disk here")])
        return future

    stores: list[PrefixStore] = []

    def gates(running: RunningRows) -> list[Gate]:
        stores.append(PrefixStore(call, running.blocks, 1 << 30))
        return [PrefixGate(stores[0], running)]

    scheduler = make_scheduler(gates=gates)
    worker = FakeWorker.of(scheduler)
    with caplog.at_level("INFO"):
        for name in "ab":
            scheduler.add_request(make_request(name, range(100, 112), max_tokens=3))
            while not scheduler.is_finished():
                stores[0].save_evicted()
                stores[0].after_step(len(run_step(scheduler, worker).req_ids) * 100)
            assert not stores[0].work_idle()
    stores[0].close()
    assert calls == ["open_block_store", "close_block_store"]
    assert [line for line in caplog.messages if "on disk" in line] == ["no prefix cache on disk: no disk here"]
