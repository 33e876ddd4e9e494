"""Progress of the running requests, as numpy columns: a pure decode step touches no Python object per request.

0 <= num_hashed * block_size <= num_computed <= num_known + num_in_flight <= limit
tokens[row, 0:num_known]                         known: prompt and sampled
[num_known, num_known + num_in_flight)           sampled by a step whose answer is not here yet
[0, num_computed)                                in KV memory, or will be once the steps in flight are done
"""

from bisect import insort

import numpy as np

from octavo.contracts.schedule import Int32Array
from octavo.scheduler.request import Request, RequestStatus


class RunningRows:
    """A fixed number of rows. A row's number is also its index in the worker, for as long as the request runs."""

    def __init__(self, max_num_rows: int, max_model_len: int) -> None:
        self.tokens: Int32Array = np.zeros((max_num_rows, max_model_len), dtype=np.int32)  # pages appear when touched
        self.num_prompt = np.zeros(max_num_rows, dtype=np.int32)
        self.num_known = np.zeros(max_num_rows, dtype=np.int32)
        self.num_in_flight = np.zeros(max_num_rows, dtype=np.int32)
        self.num_computed = np.zeros(max_num_rows, dtype=np.int32)
        self.num_blocks = np.zeros(max_num_rows, dtype=np.int32)
        self.num_hashed = np.zeros(max_num_rows, dtype=np.int32)  # full blocks whose name is known
        self.limit = np.zeros(max_num_rows, dtype=np.int32)  # tokens at which the request ends
        self.generation = np.zeros(max_num_rows, dtype=np.int64)  # rises when the row changes hands
        self.requests: list[Request | None] = [None] * max_num_rows
        self.request_ids: list[str] = [""] * max_num_rows
        self.block_ids: list[list[int]] = [[] for _ in range(max_num_rows)]
        self.last_hash: list[bytes] = [b""] * max_num_rows
        self._free_rows = list(range(max_num_rows))[::-1]
        self._order: list[tuple[tuple[int, int], int]] = []  # ((priority, arrival), row), sorted
        self._active: Int32Array | None = None  # rows of `_order`, remade when that changes
        self._active_ids: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def has_room(self) -> bool:
        return bool(self._free_rows)

    @property
    def active(self) -> Int32Array:
        """All running rows, best (priority, arrival) first. The same array object until the set changes."""
        if self._active is None:
            self._active = np.fromiter((row for _, row in self._order), dtype=np.int32, count=len(self._order))
            self._active_ids = tuple(self.request_ids[row] for _, row in self._order)
        return self._active

    def req_ids_of(self, rows: Int32Array) -> tuple[str, ...]:
        """Return the request ids of `rows`; the same tuple as last time while all of the same rows run."""
        if rows is self._active:
            return self._active_ids
        return tuple(self.request_ids[row] for row in rows.tolist())

    @property
    def worst(self) -> Request:
        """The request to preempt first."""
        return self.request_at(self._order[-1][1])

    def request_at(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def add(
        self, request: Request, block_ids: list[int], *, num_cached_blocks: int, block_size: int, last_hash: bytes
    ) -> int:
        """Move a waiting request into a free row; its tokens live there from now on."""
        row = self._free_rows.pop()
        num_tokens = len(request.token_ids)
        self.tokens[row, :num_tokens] = request.token_ids
        self.num_prompt[row], self.num_known[row], self.num_in_flight[row] = request.num_prompt_tokens, num_tokens, 0
        self.num_computed[row], self.num_hashed[row] = num_cached_blocks * block_size, num_cached_blocks
        self.num_blocks[row], self.limit[row] = len(block_ids), request.max_num_tokens
        self.requests[row], self.request_ids[row] = request, request.request_id
        self.block_ids[row], self.last_hash[row] = block_ids, last_hash
        request.row, request.status = row, RequestStatus.RUNNING
        insort(self._order, (request.order, row))
        self._active = None
        return row

    def remove(self, request: Request, status: RequestStatus) -> list[int]:
        """Give the row back; the request takes its known tokens along. Returns the blocks it held."""
        row = request.row
        assert row is not None
        request.token_ids = self.tokens[row, : self.num_known[row]].copy()
        request.row, request.status = None, status
        self.requests[row], self.request_ids[row] = None, ""
        self.generation[row] += 1
        self._order.remove((request.order, row))
        self._active = None
        self._free_rows.append(row)
        block_ids, self.block_ids[row] = self.block_ids[row], []
        return block_ids

    def append_block(self, row: int, block_id: int) -> None:
        self.block_ids[row].append(block_id)
        self.num_blocks[row] += 1

    def check_integrity(self, block_size: int) -> None:
        """Assert the invariants drawn at the top of this file, for every running row."""
        rows = self.active
        total = self.num_known[rows] + self.num_in_flight[rows]
        assert len(set(rows.tolist())) == len(rows)
        assert len(rows) + len(self._free_rows) == len(self.requests)
        assert np.all(self.num_hashed[rows] * block_size <= self.num_computed[rows])
        assert np.all(self.num_computed[rows] <= total)
        assert np.all(total <= self.limit[rows])
        assert np.all(self.num_computed[rows] <= self.num_blocks[rows] * block_size)
        assert all(len(self.block_ids[row]) == self.num_blocks[row] for row in rows.tolist())
