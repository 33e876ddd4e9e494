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
from octavo.worker.graph_key import Ending, GraphKey, context_bucket, row_bucket
from octavo.worker.logits_processor_record import LogitsProcessorRecord
from octavo.worker.request_rows import RequestRows
from octavo.worker.sampling_metadata import StepSamplingMetadata


class GraphedDecoding:
    """Owned by a runner. `step` holds the results of the last replay."""

    def __init__(
        self, step: DecodeStep, rows: RequestRows, queue: DeviceQueue, graphs: DecodeGraphs, max_model_len: int
    ) -> None:
        self.step, self.captured = step, graphs
        self._rows, self._queue, self._max_model_len = rows, queue, max_model_len

    def find(self, scheduler_output: SchedulerOutput, metadata: StepSamplingMetadata) -> Callable[[], None] | None:
        """Return what replays the step, once its record is sent; None where it has no graph, or is no pure decoding."""
        key = (
            self._key_of(scheduler_output, metadata.ending) if LogitsProcessorRecord.fits(metadata.processors) else None
        )
        return None if key is None else self.captured.find(key, self._send_padding)

    def send(self, scheduler_output: SchedulerOutput, metadata: StepSamplingMetadata) -> None:
        """Begin to copy what the host says of the step."""
        tables = table_columns(scheduler_output)
        if len(tables["grown_rows"]) > len(tables["rows"]):  # many blocks freed at once: more than the record holds
            self._rows.apply_tables(scheduler_output)
            tables = {name: tables[name] for name in ("rows", "positions")}
        self.step.record.send(self._queue, {**tables, **metadata.columns})
        if metadata.processors:
            self.step.processors.send(self._queue, metadata.processors)

    def capture_known(self) -> None:
        """Capture what engines like this one used before."""
        with torch.inference_mode():
            self.captured.capture_known(self._send_padding)

    def _key_of(self, scheduler_output: SchedulerOutput, ending: Ending) -> GraphKey | None:
        is_decoding = (
            scheduler_output.samples.all()
            and (scheduler_output.num_scheduled_tokens == 1).all()
            and not self._rows.prompt_logprobs
        )
        num_rows = row_bucket(len(scheduler_output.rows))
        if not is_decoding or num_rows > self.step.record.capacity:
            return None
        longest = int(scheduler_output.num_computed_tokens.max()) + 1
        return GraphKey(num_rows=num_rows, max_context=context_bucket(longest, self._max_model_len), ending=ending)

    def _send_padding(self) -> None:
        self.step.record.send_padding(self._queue)


def table_columns(scheduler_output: SchedulerOutput) -> dict[str, NDArray[Any]]:
    """Return a decoding step's columns of the record about rows and their blocks."""
    grown = scheduler_output.scheduled_cached_reqs
    return {
        "rows": scheduler_output.rows,
        "positions": scheduler_output.num_computed_tokens,
        "grown_rows": grown.rows,
        "grown_groups": grown.groups,
        "grown_columns": grown.columns,
        "grown_blocks": grown.block_ids,
    }
