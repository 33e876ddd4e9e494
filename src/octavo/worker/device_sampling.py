"""Sampling on the device: a step's sampling metadata, its sampled tokens, and the results that the host reads.

Legend: L = rows of logits, V = vocabulary size, R = requests in the step.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.sampling.device_draw import SamplingMetadata, draw_on_device
from octavo.sampling.device_logits_processors import (
    Arrays,
    Context,
    LogitsProcessorTensors,
    process_logits_on_device,
    processor_arrays,
)
from octavo.sampling.device_logprobs import rate_on_device, read_rating
from octavo.sampling.sampler import why_not
from octavo.worker.decode_graphs import ARGMAX, Ending
from octavo.worker.logits_rows import LogitsRows
from octavo.worker.prompt_logprobs import PromptLogprobsUpdate
from octavo.worker.request_rows import RequestRows

_FILTERS, _PENALTIES = ("top_k", "top_p", "min_p"), ("repetition", "presence", "frequency")
_SAME_NAMES = ("seed_low", "seed_high", "num_logprobs", *_FILTERS, *_PENALTIES)  # in records and in `SamplingMetadata`


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamplingMetadata:
    """Sampling metadata of one step. Empty if all rows are plain argmax."""

    ending: Ending
    columns: Arrays = field(default_factory=dict)  # [S] each, of `SamplingMetadata`
    processors: Arrays = field(default_factory=dict)  # of `LogitsProcessorTensors`, if the step has any

    @classmethod
    def of(cls, scheduler_output: SchedulerOutput, logits_rows: LogitsRows, rows: RequestRows) -> Self:
        """Gather it for the rows that sample."""
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
            "temperatures": records["temperature"].copy(),  # copies: torch cannot read the strides of a field
            "output_indices": output_indices,
            "num_prompt_tokens": num_prompt_tokens,
            "mask_indices": processors.pop("mask_indices", np.full(len(chosen), -1)),
            **{name: records[name].copy() for name in _SAME_NAMES},
        }
        return cls(ending=ending, columns=columns, processors=processors)

    def metadata_on_device(self, rows: RequestRows) -> SamplingMetadata:
        """Copy the columns to the device."""
        return SamplingMetadata(**dict(zip(self.columns, rows.send(*self.columns.values()), strict=True)))

    def processors_on_device(self, rows: RequestRows) -> LogitsProcessorTensors | None:
        """Copy the logits processors to the device, if the step has any."""
        return LogitsProcessorTensors.of(self.processors, rows.send) if self.processors else None


def context_on_device(logits_rows: LogitsRows, rows: RequestRows) -> Context:
    """Return the tokens known to the rows of a step: drafts included, newly sampled tokens excluded."""
    num_tokens = logits_rows.ends.astype(np.int64)
    row_ids, on_device = rows.send(logits_rows.rows.astype(np.int64), num_tokens)
    return Context(
        token_ids=rows.token_ids, rows=row_ids, num_tokens=on_device, max_tokens=int(num_tokens.max(initial=1))
    )


NUM_RESULTS = 3
_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Results of L rows, on the device."""

    token_ids: torch.Tensor  # [L] int64
    max_logit: torch.Tensor  # [L] float32, of the model's logits
    max_processed_logit: torch.Tensor  # [L] float32, of the processed logits
    ratings: torch.Tensor | None = None  # [L, .] int64, see `rate_on_device`

    @classmethod
    def of_argmax(cls, max_logit: torch.Tensor, token_ids: torch.Tensor) -> Self:
        """Wrap the rows' largest logits [L] and their token ids [L]."""
        return cls(token_ids=token_ids, max_logit=max_logit, max_processed_logit=max_logit)

    def results(self) -> torch.Tensor:
        """Return [L, 3] int64: tokens, and the bits of both largest logits as float64."""
        floats = (x.to(torch.float64).view(torch.int64) for x in (self.max_logit, self.max_processed_logit))
        return torch.stack((self.token_ids, *floats), dim=-1)


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    ending: Ending,
    context: Context,
    processors: LogitsProcessorTensors | None,
) -> Sampled:
    """Sample a token for each row of logits [L, V] float32; process logits and compute logprobs as `ending` says."""
    left = logits
    if ending.has_processors:
        assert processors is not None, "the step has logits processors"
        left = process_logits_on_device(logits, metadata, context, processors)
    max_processed_logit, token_ids = draw_on_device(left, metadata, is_filtered=ending.is_filtered)
    max_logit = logits.amax(-1) if ending.has_processors else max_processed_logit
    ratings = rate_on_device(logits, max_logit, token_ids, metadata.num_logprobs) if ending.is_rated else None
    return Sampled(token_ids=token_ids, max_logit=max_logit, max_processed_logit=max_processed_logit, ratings=ratings)


class SampledOnHost:
    """Reads the results of a step once they have arrived."""

    def __init__(
        self,
        scheduler_output: SchedulerOutput,
        logits_rows: LogitsRows,
        num_logprobs: NDArray[np.int64],
        results: torch.Tensor,
        ratings: torch.Tensor | None,
        queue: DeviceQueue,
        vocab_size: int,
    ) -> None:
        """Start copying `results` [L, 3] and `ratings` [L, .] of a step; its rows have `num_logprobs` [L]."""
        self._scheduler_output, self._logits_rows = scheduler_output, logits_rows
        self._num_logprobs, self._vocab_size = num_logprobs, vocab_size
        self._results = _begin_copy(results, queue)
        self._ratings = None if ratings is None else _begin_copy(ratings, queue)
        self._wait = queue.mark()

    def model_output(self, prompts: PromptLogprobsUpdate) -> ModelRunnerOutput:
        """Wait, and return the model output."""
        self._wait()
        token_ids, *bits = self._results.numpy().T  # [L] each
        max_logit, max_processed_logit = (np.ascontiguousarray(column).view(np.float64) for column in bits)
        errors = _errors(max_logit, max_processed_logit)
        logprobs = {at: entry for at, entry in self._logprobs(max_logit).items() if at not in errors}
        return self._logits_rows.model_output(
            self._scheduler_output, token_ids.astype(np.int32), logprobs, errors, prompts
        )

    def _logprobs(self, max_logit: NDArray[np.float64]) -> dict[int, TokenLogprobs]:
        """Return those of rows that asked for some, by index in L."""
        if self._ratings is None:
            return {}
        ratings = self._ratings.numpy()
        return {
            at: read_rating(ratings[at], float(max_logit[at]), int(self._num_logprobs[at]), self._vocab_size)
            for at in ((self._num_logprobs >= 0) & np.isfinite(max_logit)).nonzero()[0].tolist()
        }


def _errors(max_logit: NDArray[np.float64], max_processed_logit: NDArray[np.float64]) -> dict[int, str]:
    """Return why rows of logits failed, by index in L: the model's own logits first, then the processed ones."""
    errors: dict[int, str] = {}
    for values in (max_processed_logit, max_logit):
        errors |= {at: why_not(float(values[at])) for at in (~np.isfinite(values)).nonzero()[0].tolist()}
    return errors


def _begin_copy(x: torch.Tensor, queue: DeviceQueue) -> torch.Tensor:
    host = queue.host_bytes(x.numel() * _WORD_BYTES).view(torch.int64).view_as(x)
    host.copy_(x, non_blocking=True)
    return host
