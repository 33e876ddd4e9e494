"""Progress of the running requests, as numpy columns: a pure decode step touches no Python object per request.

num_hashed <= num_computed <= num_known + num_in_flight <= limit, num_computed <= num_slots of every group
tokens[row, 0:num_known]                         known: prompt and sampled
[num_known, num_known + num_in_flight)           sampled by a step whose output is pending; an upper bound
[0, num_computed)                                in KV memory, or will be once the steps in flight are done; tokens that
                                                 do not come are rolled back
[0, num_hashed)                                   in full blocks whose hashes are known

Only `RunningRows` changes these columns and the tables of blocks.

Legend: R = rows, G = KV groups, K = most new tokens of a row.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import BoolArray, Int32Array
from octavo.scheduler.block_manager import BlockManager, CachedPrefix
from octavo.scheduler.request import Request, RequestStatus

RowIndices = NDArray[np.intp]  # numpy's index type: with any other, an indexed read takes three times as long


class RunningRows:
    """A fixed number of rows. A row's number is also its index in the worker while the request runs."""

    def __init__(self, max_num_rows: int, max_model_len: int, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.max_model_len = max_model_len
        num_groups = len(blocks.groups)
        self.tokens: Int32Array = np.zeros((max_num_rows, max_model_len), dtype=np.int32)  # pages appear on first touch
        self.num_prompt = np.zeros(max_num_rows, dtype=np.int32)
        self.num_known = np.zeros(max_num_rows, dtype=np.int32)
        self.num_in_flight = np.zeros(max_num_rows, dtype=np.int32)
        self.num_computed = np.zeros(max_num_rows, dtype=np.int32)
        self.num_hashed = np.zeros(max_num_rows, dtype=np.int32)
        # Of each KV group [G, rows]: end of what its blocks can hold, and columns without a block at the front.
        self.num_slots = np.zeros((num_groups, max_num_rows), dtype=np.int32)
        self.slots_of_group = list(self.num_slots)  # G views [rows]
        self.num_freed = np.zeros((num_groups, max_num_rows), dtype=np.int32)
        self.limit = np.zeros(max_num_rows, dtype=np.int32)  # tokens at which the request ends
        self.generation = np.zeros(max_num_rows, dtype=np.int64)  # incremented when the row's request leaves
        self.is_constrained = np.zeros(max_num_rows, dtype=np.bool_)  # its next token depends on the last one's value
        self.is_speculative = np.zeros(max_num_rows, dtype=np.bool_)  # may get several tokens in a step
        self.requests: list[Request | None] = [None] * max_num_rows
        self._request_ids = np.full(max_num_rows, "", dtype=object)
        # By KV group, then row: all columns of its table.
        self.block_ids: list[list[list[int]]] = [[[] for _ in range(max_num_rows)] for _ in range(num_groups)]
        self.last_hash: list[bytes] = [b""] * max_num_rows  # hash of the last full block
        self._free_rows = list(range(max_num_rows))[::-1]
        self._order: list[tuple[int, int]] = []  # of all running requests, best first
        self._ordered_rows = array("q")  # their rows
        self._active: RowIndices | None = None  # the same as an index array, built on demand
        self._active_ids: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def has_room(self) -> bool:
        return bool(self._free_rows)

    @property
    def active(self) -> RowIndices:
        """All running rows, best (priority, arrival) first. The same array object until the set changes."""
        if self._active is None:
            self._active, self._active_ids = np.array(self._ordered_rows, dtype=np.intp), None
        return self._active

    def req_ids_of(self, rows: RowIndices) -> tuple[str, ...]:
        """Return the request ids of `rows`; the same tuple object for `active` until the set changes."""
        if rows is not self._active:
            return tuple(self._request_ids[rows].tolist())
        if self._active_ids is None:
            self._active_ids = tuple(self._request_ids[rows].tolist())
        return self._active_ids

    @property
    def num_streams(self) -> int:
        """The number of requests that have produced output, so a client is waiting for the next token."""
        rows = self.active
        return int(np.count_nonzero(self.num_known[rows] > self.num_prompt[rows]))

    @property
    def worst(self) -> Request:
        """The request to preempt first."""
        return self.request_at(self._ordered_rows[-1])

    def request_at(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def holders(self, blocks: Iterable[tuple[int, int]]) -> list[Request]:
        """Return the requests that hold any of these blocks, given as (group, block). Slow: reads every table."""
        wanted = frozenset(blocks)
        rows = [
            row
            for row in self._ordered_rows
            if any((group, block) in wanted for group, tables in enumerate(self.block_ids) for block in tables[row])
        ]
        return [self.request_at(row) for row in rows]

    def insert(self, request: Request, block_ids: list[list[int]], prefix: CachedPrefix) -> None:
        """Move a waiting request into a free row; its tokens live there from now on. `prefix` is part of its blocks."""
        row = self._free_rows.pop()
        num_tokens = len(request.token_ids)
        self.tokens[row, :num_tokens] = request.token_ids
        self.num_prompt[row], self.num_known[row], self.num_in_flight[row] = request.num_prompt_tokens, num_tokens, 0
        self.num_computed[row] = self.num_hashed[row] = prefix.num_tokens
        self.limit[row] = request.max_num_tokens
        self.is_constrained[row] = request.is_constrained
        self.is_speculative[row] = request.params.speculative
        self.requests[row], self._request_ids[row] = request, request.request_id
        for group, table in enumerate(block_ids):
            self.block_ids[group][row] = table
            self.num_slots[group, row] = len(table) * self.blocks.block_sizes[group]
            self.num_freed[group, row] = prefix.first_columns[group]
        self.last_hash[row] = prefix.last_hash
        request.row, request.status = row, RequestStatus.RUNNING
        place = bisect_left(self._order, request.order)
        self._order.insert(place, request.order)
        self._ordered_rows.insert(place, row)
        self._active = None

    def advance(self, rows: RowIndices, ends: Int32Array, num_sampled: NDArray[np.integer] | BoolArray) -> None:
        """Count the tokens of `rows` [R] before `ends` [R] as computed, and those to be sampled [R] as in flight."""
        self.num_computed[rows] = ends
        self.num_in_flight[rows] += num_sampled

    def commit(self, rows: RowIndices, positions: Int32Array, token_ids: Int32Array) -> None:
        """Turn the oldest token in flight of each of `rows` [R] into a known one [R], at `positions` [R]."""
        self.tokens[rows, positions] = token_ids
        self.num_known[rows] = positions + 1
        self.num_in_flight[rows] -= 1

    def commit_several(self, rows: RowIndices, table: Int32Array, counts: Int32Array, num_expected: Int32Array) -> None:
        """Turn `num_expected` [R] tokens in flight into `counts` [R] known ones, at the front of `table` [R, K].

        Those that did not come are rolled back: later steps overwrite their KV slots.
        """
        positions, is_new = self.num_known[rows], np.arange(table.shape[1]) < counts[:, None]
        at, offsets = is_new.nonzero()
        self.tokens[rows[at], positions[at] + offsets] = table[is_new]
        self.num_known[rows] = positions + counts
        self.num_in_flight[rows] -= num_expected
        self.num_computed[rows] -= num_expected - counts

    def add_blocks(
        self, rows: Sequence[int], counts: Sequence[int], group: int
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Give each of `rows` [R] more blocks, next to its last one where possible; yield row, first column and ids."""
        tables, num_slots = self.block_ids[group], self.slots_of_group[group]
        block_size = self.blocks.block_sizes[group]
        for row, count in zip(rows, counts, strict=True):
            table = tables[row]
            first, block_ids = len(table), self.blocks.allocate_blocks(count, group, table[-1])
            table += block_ids
            num_slots[row] += count * block_size
            yield row, first, block_ids

    def hash_blocks(self, row: int, num_tokens: int) -> list[tuple[int, int]]:
        """Hash the blocks that the first `num_tokens` tokens of a row fill; return those that became findable.

        All of these tokens must be known: a token in flight never enters a hash.
        """
        start, end = int(self.num_hashed[row]), num_tokens - num_tokens % self.blocks.block_size
        if start >= end or not self.blocks.enable_prefix_caching:
            return []
        self.last_hash[row], hashed = self.blocks.hash_blocks(
            [tables[row] for tables in self.block_ids],
            self.last_hash[row],
            self.tokens[row, start:end],
            start,
            self.request_at(row).block_keys,
        )
        self.num_hashed[row] = end
        return hashed

    def hash_computed(self, row: int) -> list[tuple[int, int]]:
        """Hash the blocks that a row is about to free. Any step in flight may be the one that fills them."""
        return self.hash_blocks(row, int(min(self.num_computed[row], self.num_known[row])))

    def free_columns(self, row: int, group: int, end: int) -> None:
        """Free the blocks of a row's columns up to `end`; the null block replaces them."""
        first, self.num_freed[group, row] = int(self.num_freed[group, row]), end
        table = self.block_ids[group][row]
        freed, table[first:end] = table[first:end], [self.blocks.null_block(group)] * (end - first)
        self.blocks.free_blocks(freed, group)

    def held_blocks(self, row: int) -> list[list[int]]:
        """Return the blocks that a row holds, by group."""
        return [
            tables[row][first:] if (first := self.num_freed[group, row]) else tables[row]
            for group, tables in enumerate(self.block_ids)
        ]

    def remove(self, request: Request, status: RequestStatus, *, is_sound: bool) -> list[tuple[int, int]]:
        """Free a request's row and blocks; its known tokens move to the request.

        Sound blocks stay findable; others lose their hash. Returns the blocks that became findable.
        """
        row = request.row
        assert row is not None
        hashed = self.hash_computed(row) if is_sound else []
        held = self.held_blocks(row)
        if not is_sound:
            self.blocks.forget_context(
                held, self.tokens[row, : self.num_hashed[row]], request.block_root, request.block_keys
            )
        for group, block_ids in enumerate(held):
            self.blocks.free_blocks(block_ids, group)
            self.block_ids[group][row] = []
        request.token_ids = self.tokens[row, : self.num_known[row]].copy()
        request.row, request.status = None, status
        place = bisect_left(self._order, request.order)
        del self._order[place], self._ordered_rows[place]
        self._active = None
        self.requests[row] = None
        self.generation[row] += 1
        self._free_rows.append(row)
        return hashed

    def check_integrity(self, others: Iterable[tuple[int, int]] = ()) -> None:
        """Assert the invariants at the top of this file, and that blocks have as many owners as they count.

        `others` are the blocks that others own, as (group, block).
        """
        rows = self.active
        total = self.num_known[rows] + self.num_in_flight[rows]
        assert sorted([*rows.tolist(), *self._free_rows]) == list(range(len(self.requests)))
        assert self._order == sorted(self.request_at(row).order for row in rows.tolist())
        assert self.req_ids_of(rows) == tuple(self.request_at(row).request_id for row in rows.tolist())
        assert not (self.num_hashed[rows] % self.blocks.block_size).any()
        assert (self.num_hashed[rows] <= self.num_computed[rows]).all()
        assert (self.num_computed[rows] <= total).all()
        assert (total <= self.limit[rows]).all()
        assert (self.num_computed[rows] <= self.num_slots[:, rows]).all()
        for group, (size, pool) in enumerate(zip(self.blocks.block_sizes, self.blocks.pools, strict=True)):
            num_slots = self.num_slots[group, rows].tolist()
            assert [len(self.block_ids[group][row]) * size for row in rows.tolist()] == num_slots
            owners = np.zeros(pool.num_blocks, dtype=np.int64)
            for row in rows.tolist():
                np.add.at(owners, self.held_blocks(row)[group], 1)
            np.add.at(owners, [block_id for of, block_id in others if of == group], 1)
            assert owners.tolist() == pool.ref_counts
            pool.check_integrity()
