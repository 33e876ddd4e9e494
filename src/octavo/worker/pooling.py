"""Vectors instead of tokens: which rows of a step's hidden states are read, and what becomes of them.

A prompt may come in chunks. A mean is a sum of integers, of hidden states in fixed point: no order of summation shows.

Legend: T = tokens of the step, D = hidden size, L = rows of logits, N = requests whose vectors are complete, K = size
of a vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.metadata import ForwardBatch
from octavo.contracts.engine import PoolingTask
from octavo.contracts.schedule import SchedulerOutput
from octavo.models.interfaces import CausalLM
from octavo.sampling.filters import log_of_mass, masses, relative_logits

# Of the fixed point: its steps are finer than float32's of 2^-8 and above, and sums of 2^15 tokens fit.
_FRACTION, _LARGEST = 2.0**32, 2.0**16
_LOGITS_ROWS = 64  # at once: 64 rows of 152k float32 are 39 MB


@dataclass(slots=True)
class PooledRow:
    """A row without sampling parameters."""

    task: PoolingTask
    num_prompt_tokens: int
    gathered: Tensor | None = None  # [D] of the tokens so far: their sum in int64, or the first one
    is_unsound: Tensor | None = None  # [D] where a sum has numbers in it that are none, or too large

    def gather(self, start: int, hidden: Tensor) -> None:
        """Take in the hidden states [., D] of the row's next tokens, from position `start` on."""
        if self.task.kind == "cls":
            if start == 0:
                self.gathered = hidden[0].clone()  # not a view of a buffer that the next step overwrites
            return
        is_sound = hidden.abs() < _LARGEST  # of NaN, too, false
        total = (hidden.double() * _FRACTION).round_().masked_fill_(~is_sound, 0.0).to(torch.int64).sum(0)
        is_unsound = ~is_sound.all(0)
        if start and self.gathered is not None and self.is_unsound is not None:
            total, is_unsound = self.gathered + total, self.is_unsound | is_unsound
        self.gathered, self.is_unsound = total, is_unsound

    def result(self) -> Tensor:
        """Return the vector [D] float32 of the whole prompt, NaN where hidden states are not finite."""
        assert self.gathered is not None, "the first token was computed"
        if self.task.kind == "cls":
            return self.gathered.float()
        assert self.is_unsound is not None, "known with the sum"
        mean = (self.gathered.double() / _FRACTION / self.num_prompt_tokens).float()
        return mean.masked_fill(self.is_unsound, float("nan"))


def pooled_vectors(
    rows: Mapping[int, PooledRow],
    step: SchedulerOutput,
    logits_requests: list[int],  # [L] which request of the step each row of logits belongs to
    batch: ForwardBatch,
    hidden: Tensor,  # [T, D], or those of the rows of logits
    model: CausalLM,
) -> dict[str, Tensor]:
    """Return the vectors [K] float32 of requests whose prompts are complete, by request id."""
    for index, row in enumerate(step.rows.tolist()):
        if row in rows and rows[row].task.reads_whole_prompt:
            tokens = slice(batch.query_start_loc_list[index], batch.query_start_loc_list[index + 1])
            rows[row].gather(int(step.num_computed_tokens[index]), hidden[tokens])
    of_rows = step.rows.tolist()
    at = [place for place, index in enumerate(logits_requests) if of_rows[index] in rows]
    names = [step.req_ids[logits_requests[place]] for place in at]
    wanted = [rows[of_rows[logits_requests[place]]] for place in at]
    last, adapter_ids = batch.head_inputs(hidden)  # [L, D]
    vectors: dict[str, Tensor] = {}
    plain = [number for number, row in enumerate(wanted) if row.task.kind != "labels"]
    if plain:
        states = [wanted[n].result() if wanted[n].task.reads_whole_prompt else last[at[n]].float() for n in plain]
        made = model.finish_pooled(torch.stack(states))  # [N, K]
        vectors.update(zip([names[n] for n in plain], made, strict=True))
    labelled = [number for number, row in enumerate(wanted) if row.task.kind == "labels"]
    for first in range(0, len(labelled), _LOGITS_ROWS):
        part = labelled[first : first + _LOGITS_ROWS]
        places = torch.tensor([at[n] for n in part], device=hidden.device)
        logits = model.compute_logits(last[places], None if adapter_ids is None else adapter_ids[places])
        vectors.update(zip([names[n] for n in part], _logprobs(logits, [wanted[n].task for n in part]), strict=True))
    return vectors


def _logprobs(logits: Tensor, tasks: list[PoolingTask]) -> list[Tensor]:
    """Return logarithms of the probabilities of each row's tokens; of logits [., V] float32. Waits for the device."""
    relative = relative_logits(logits)
    totals = masses(relative).sum(-1).tolist()
    found = []
    for row, total, task in zip(relative, totals, tasks, strict=True):
        ids = torch.tensor(task.token_ids, device=logits.device)
        is_sound = total > 0
        found.append(row[ids] - log_of_mass(total) if is_sound else row[ids] * float("nan"))
    return found
