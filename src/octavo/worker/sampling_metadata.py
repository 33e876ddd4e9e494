"""What the rows of a step that sample want of their logits: how the step ends, and the numbers that go to the device.

Legend: S = rows of logits.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from octavo.contracts.schedule import SchedulerOutput
from octavo.sampling.device_draw import SamplingMetadata
from octavo.sampling.device_logits_processors import Arrays, Context, LogitsProcessorTensors, processor_arrays
from octavo.worker.graph_key import ARGMAX, Ending
from octavo.worker.logits_rows import LogitsRows
from octavo.worker.request_rows import RequestRows

_FILTERS, _PENALTIES = ("top_k", "top_p", "min_p"), ("repetition", "presence", "frequency")
_SAME_NAMES = ("seed_low", "seed_high", "num_logprobs", *_FILTERS, *_PENALTIES)  # in records and in `SamplingMetadata`


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamplingMetadata:
    """Of one step. Nothing is said of rows that want their largest logit alone."""

    ending: Ending
    columns: Arrays = field(default_factory=dict)  # [S] each, of `SamplingMetadata`
    processors: Arrays = field(default_factory=dict)  # of `LogitsProcessorTensors`, where the step is edited

    @classmethod
    def of(cls, scheduler_output: SchedulerOutput, logits_rows: LogitsRows, rows: RequestRows) -> Self:
        """Gather from the rows of an order that it samples."""
        chosen = logits_rows.rows
        records = rows.sampling.records(chosen)
        is_drawn = records["temperature"] != 0.0
        ending = Ending(
            "drawn",
            has_processors=scheduler_output.token_masks is not None or bool(records["has_processors"].any()),
            is_filtered=bool((records["is_filtered"] & is_drawn).any()),
            is_rated=bool((records["num_logprobs"] >= 0).any()),
        )
        if ending == Ending("drawn") and not is_drawn.any():
            return cls(ending=ARGMAX)
        num_prompt_tokens = rows.num_prompt_tokens[chosen].astype(np.int64)
        output_indices = logits_rows.ends.astype(np.int64) - num_prompt_tokens
        processors: Arrays = {}
        if ending.has_processors:
            processors = processor_arrays(rows.sampling, chosen, output_indices, scheduler_output.token_masks)
        columns = {
            "temperatures": records["temperature"].copy(),  # copies: torch does not read the strides of a field
            "output_indices": output_indices,
            "num_prompt_tokens": num_prompt_tokens,
            "mask_indices": processors.pop("mask_indices", np.full(len(chosen), -1)),
            **{name: records[name].copy() for name in _SAME_NAMES},
        }
        return cls(ending=ending, columns=columns, processors=processors)

    def metadata_on_device(self, rows: RequestRows) -> SamplingMetadata:
        """Send the columns."""
        return SamplingMetadata(**dict(zip(self.columns, rows.send(*self.columns.values()), strict=True)))

    def processors_on_device(self, rows: RequestRows) -> LogitsProcessorTensors | None:
        """Send the edits, of a step that has some."""
        return LogitsProcessorTensors.of(self.processors, rows.send) if self.processors else None


def context_on_device(logits_rows: LogitsRows, rows: RequestRows) -> Context:
    """Return what the rows of a step know, drafts included, without what it samples."""
    num_tokens = logits_rows.ends.astype(np.int64)
    row_ids, on_device = rows.send(logits_rows.rows.astype(np.int64), num_tokens)
    return Context(
        token_ids=rows.token_ids, rows=row_ids, num_tokens=on_device, max_tokens=int(num_tokens.max(initial=1))
    )
