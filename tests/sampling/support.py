"""Shorthand for sampling tests: rows of logits in, tokens out, the worker's rows made on the way."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import Int32Array, TokenMasks
from octavo.kernels.reference import Kernels
from octavo.sampling.draw import SamplingMetadata
from octavo.sampling.logits_processors import Context, LogitsProcessorTensors, process_logits
from octavo.sampling.logprobs import rate, read_rating
from octavo.sampling.rows import ARGMAX, SamplingRows, StepSampling
from octavo.sampling.sampler import Sampled, SampledTokens, Sampler, read_now
from octavo.sampling_params import SamplingParams

MAX_LEN = 48


class Rows(SamplingRows):
    """Rows with their tokens."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_rows, vocab_size)
        # What is behind a row's end means nothing.
        self.token_ids = torch.full((num_rows, MAX_LEN), 5, dtype=torch.int32, device=device)
        self.lens = [0] * num_rows

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.set_row(row, params, eos_token_ids, bad_words, len(prompt))
        known = [*prompt, *output]
        self.token_ids[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.lens[row] = len(known)

    def append(self, row: int, token_id: int) -> None:
        self.token_ids[row, self.lens[row]] = token_id
        self.lens[row] += 1

    def gather(
        self,
        row_ids: Sequence[int],
        output_index: int | NDArray[np.int64] | None = None,
        masks: TokenMasks | None = None,
    ) -> StepSampling:
        """Return what a step asks for; with an output index in place of those that the tokens say."""
        rows = np.array(row_ids, dtype=np.int32)
        num_tokens = np.array(self.lens)[rows]
        if output_index is not None:
            num_tokens = self.records["num_prompt_tokens"][rows] + output_index
        return self.step(rows, num_tokens.astype(np.int32), masks)

    def send(self, *arrays: NDArray[np.generic]) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.token_ids.device) for array in arrays]

    def metadata(self, step: StepSampling) -> SamplingMetadata:
        return SamplingMetadata(**dict(zip(step.arrays[0], self.send(*step.arrays[0].values()), strict=True)))

    def process(self, logits: torch.Tensor, step: StepSampling) -> torch.Tensor:
        """Apply the step's logits processors to logits [L, V]."""
        rows, num_tokens = self.send(step.rows.astype(np.int64), step.num_tokens.astype(np.int64))
        context = Context(token_ids=self.token_ids, rows=rows, num_tokens=num_tokens, max_tokens=MAX_LEN)
        processors = LogitsProcessorTensors.on_device(step.arrays[1], self.send)
        return process_logits(logits, self.metadata(step), context, processors)


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], output_index: int = 0) -> SampledTokens:
    """Sample `logits` [L, V], row j with `params[j]` and no history; seeds default to the row's number.

    By the definition, and by the C++ kernels where they were built: they must say the same.
    """
    rows = Rows(len(params), logits.shape[1])
    for row, row_params in enumerate(params):
        rows.add(row, row_params if row_params.seed is not None else row_params.replace(seed=row))
    return sample_rows(rows, logits, rows.gather(range(len(params)), output_index))


def sample_rows(rows: Rows, logits: torch.Tensor, step: StepSampling) -> SampledTokens:
    """Do what `Sampler.sample` does, in every way that there is, and hold them against one another."""
    if step.ending == ARGMAX:
        return read_now(Sampled.of_argmax(*logits.max(-1)), step)
    ways = [Sampler(rows.token_ids, rows.send, Kernels(), is_queued=is_queued) for is_queued in (True, False)]
    first, *others = (read_now(way.sample(logits, step), step) for way in ways)
    is_good = [at for at in range(len(logits)) if at not in first.errors]
    for other in others:
        assert first.token_ids[is_good].tolist() == other.token_ids[is_good].tolist()
        assert (other.errors, other.logprobs) == (first.errors, first.logprobs)
    return first


def sample_one(logits: Sequence[float], params: SamplingParams, output_index: int = 0) -> int:
    """Sample one row of `logits` [V] alone; it must succeed."""
    output = sample(torch.tensor([logits]), [params], output_index)
    assert not output.errors
    return int(output.token_ids[0])


def token_logprobs(logits: torch.Tensor, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Return those of `token_id` and of the `num_logprobs` top tokens of `logits` [V]."""
    peak, token_ids = logits.amax(), torch.tensor([token_id], device=logits.device)
    rating = rate(logits[None], peak[None], token_ids, torch.full_like(token_ids, num_logprobs), num_logprobs)
    return read_rating(rating[0].cpu().numpy(), float(peak), num_logprobs, len(logits))


def masks_of(masks: dict[int, Int32Array]) -> TokenMasks | None:
    """Return masks by row of logits."""
    if not masks:
        return None
    return TokenMasks(logits_rows=np.array(list(masks), dtype=np.int32), words=np.stack(list(masks.values())))
