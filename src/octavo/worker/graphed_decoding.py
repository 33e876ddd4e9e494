"""Steps of pure decoding by captured graphs: which one fits an order, and the record that it reads.

Legend: R = requests in the step.
"""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from octavo.contracts.schedule import SchedulerOutput
from octavo.device.device_queue import DeviceQueue
from octavo.worker.decode_graphs import DecodeGraphs
from octavo.worker.decode_step import DecodeStep
from octavo.worker.edit_record import EditRecord
from octavo.worker.graph_key import Ending, GraphKey, context_bucket, row_bucket
from octavo.worker.request_rows import RequestRows
from octavo.worker.step_wishes import StepWishes


class GraphedDecoding:
    """Owned by a runner. `step` holds the results of the last replay."""

    def __init__(
        self, step: DecodeStep, rows: RequestRows, queue: DeviceQueue, graphs: DecodeGraphs, max_model_len: int
    ) -> None:
        self.step, self.captured = step, graphs
        self._rows, self._queue, self._max_model_len = rows, queue, max_model_len

    def find(self, order: SchedulerOutput, wishes: StepWishes) -> Callable[[], None] | None:
        """Return what replays the step, once its record is sent; None where it has no graph, or is no pure decoding."""
        key = self._key_of(order, wishes.ending) if EditRecord.fits(wishes.edits) else None
        return None if key is None else self.captured.find(key, self._send_padding)

    def send(self, order: SchedulerOutput, wishes: StepWishes) -> None:
        """Begin to copy what the host says of the step."""
        self.step.record.send(self._queue, {**table_columns(order), **wishes.columns})
        if wishes.edits:
            self.step.edits.send(self._queue, wishes.edits)

    def capture_known(self) -> None:
        """Capture what engines like this one used before."""
        with torch.inference_mode():
            self.captured.capture_known(self._send_padding)

    def _key_of(self, order: SchedulerOutput, ending: Ending) -> GraphKey | None:
        is_decoding = order.samples.all() and (order.num_scheduled_tokens == 1).all() and not self._rows.prompt_logprobs
        num_rows = row_bucket(len(order.rows))
        if not is_decoding or num_rows > self.step.record.capacity or len(order.scheduled_cached_reqs.rows) > num_rows:
            return None
        longest = int(order.num_computed_tokens.max()) + 1
        return GraphKey(num_rows=num_rows, max_context=context_bucket(longest, self._max_model_len), ending=ending)

    def _send_padding(self) -> None:
        self.step.record.send_padding(self._queue)


def table_columns(order: SchedulerOutput) -> dict[str, NDArray[Any]]:
    """Return a decoding step's columns of the record about rows and their blocks."""
    grown = order.scheduled_cached_reqs
    return {
        "rows": order.rows,
        "positions": order.num_computed_tokens,
        "grown_rows": grown.rows,
        "grown_groups": grown.groups,
        "grown_columns": grown.columns,
        "grown_blocks": grown.block_ids,
    }
