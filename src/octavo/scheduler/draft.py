"""The step being put together: what running and admitted requests compute, and the order that comes of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.engine import AdmittedRequest
from octavo.contracts.schedule import CachedRequestData, Int32Array, NewRequestData, SchedulerOutput
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.request import Request
from octavo.scheduler.running import RunningRows

_NO_ROWS: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight:
    """What is needed to read a step's answer, even if rows have changed hands since."""

    output: SchedulerOutput
    generations: NDArray[np.int64]  # [R] of each row when the step was made
    named_blocks: list[int]  # became findable on the promise that this step fills them
    admitted: dict[str, AdmittedRequest]


class StepDraft:
    """Made anew for every step by the scheduler, which decides; this one keeps the books."""

    def __init__(self, running: RunningRows, blocks: BlockManager) -> None:
        self._running = running
        self._blocks = blocks
        self._rows = self._counts = _NO_ROWS
        self._new_block_rows: list[int] = []
        self._new_block_ids: list[int] = []
        self._named_blocks: list[int] = []
        self._admitted: list[Request] = []
        self._admitted_counts: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the running requests; what admission adds is not in it."""
        return int(self._counts.sum())

    def add_running(self, rows: Int32Array, counts: Int32Array, missing_blocks: Int32Array) -> None:
        """Take up running rows [R] with `counts` tokens each, and give them the blocks that they miss."""
        self._rows, self._counts = rows, counts
        for index in missing_blocks.nonzero()[0].tolist():
            row = int(rows[index])
            for block_id in self._blocks.allocate_blocks(
                int(missing_blocks[index]), after=self._running.block_ids[row][-1]
            ):
                self._running.append_block(row, block_id)
                self._new_block_rows.append(row)
                self._new_block_ids.append(block_id)
        self._name_full_blocks(rows, counts)

    def add_admitted(self, request: Request, budget: int) -> int:
        """Take up a request that has just got its row; return how many tokens it computes in this step.

        Its full blocks become findable at once: siblings that arrive together share them, because a step writes all
        keys and values before it reads any.
        """
        assert request.row is not None
        count = min(len(request.token_ids) - int(self._running.num_computed[request.row]), budget)
        self._admitted.append(request)
        self._admitted_counts.append(count)
        self._name_full_blocks(np.array([request.row], dtype=np.int32), np.array([count], dtype=np.int32))
        return count

    def book(self, step: int, forgotten_req_ids: list[str], now_s: float) -> StepInFlight:
        """Close the draft: write the order, and count its tokens as computed."""
        running = self._running
        new_requests = [self._new_request_data(request) for request in self._admitted]
        admitted = self._admissions(now_s)
        rows, counts = self._all_rows()
        starts = running.num_computed[rows]
        ends = starts + counts
        samples = ends == running.num_known[rows] + running.num_in_flight[rows]
        running.num_computed[rows] = ends
        running.num_in_flight[rows] += samples
        output = SchedulerOutput(
            step=step,
            req_ids=running.req_ids_of(rows),
            rows=rows,
            num_computed_tokens=starts,
            num_scheduled_tokens=counts,
            samples=samples,
            total_num_scheduled_tokens=int(counts.sum()),
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=CachedRequestData(
                rows=np.array(self._new_block_rows, dtype=np.int32),
                block_ids=np.array(self._new_block_ids, dtype=np.int32),
            ),
            finished_req_ids=forgotten_req_ids,
        )
        return StepInFlight(
            output=output,
            generations=running.generation[rows],
            named_blocks=self._named_blocks,
            admitted=admitted,
        )

    def _all_rows(self) -> tuple[Int32Array, Int32Array]:
        if not self._admitted:
            return self._rows, self._counts
        rows = np.array([request.row for request in self._admitted], dtype=np.int32)
        counts = np.array(self._admitted_counts, dtype=np.int32)
        return np.concatenate([self._rows, rows]), np.concatenate([self._counts, counts])

    def _new_request_data(self, request: Request) -> NewRequestData:
        row = request.row
        assert row is not None
        return NewRequestData(
            request_id=request.request_id,
            row=row,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.params,
            eos_token_ids=request.eos_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            block_ids=list(self._running.block_ids[row]),
            num_computed_tokens=int(self._running.num_computed[row]),
        )

    def _admissions(self, now_s: float) -> dict[str, AdmittedRequest]:
        """Report requests that run for the first time; one resumed after a preemption was reported then."""
        return {
            request.request_id: AdmittedRequest(
                scheduled_time_s=now_s, num_cached_tokens=int(self._running.num_computed[request.row])
            )
            for request in self._admitted
            if request.num_preemptions == 0
        }

    def _name_full_blocks(self, rows: Int32Array, counts: Int32Array) -> None:
        """Name the blocks that this step fills with known tokens. A token in flight never enters a name."""
        running, block_size = self._running, self._blocks.block_size
        num_full = np.minimum(running.num_computed[rows] + counts, running.num_known[rows]) // block_size
        for index in (num_full > running.num_hashed[rows]).nonzero()[0].tolist():
            row = int(rows[index])
            for block in range(int(running.num_hashed[row]), int(num_full[index])):
                self._name_block(row, block)
            running.num_hashed[row] = num_full[index]

    def _name_block(self, row: int, block: int) -> None:
        running, block_size = self._running, self._blocks.block_size
        token_ids = running.tokens[row, block * block_size : (block + 1) * block_size]
        block_id = running.block_ids[row][block]
        running.last_hash[row], is_bearer = self._blocks.name_block(block_id, running.last_hash[row], token_ids)
        if is_bearer:
            self._named_blocks.append(block_id)
