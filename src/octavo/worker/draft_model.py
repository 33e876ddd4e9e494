"""The draft model of a rank: it samples the drafts of a step before the model verifies them.

It has its own keys and values, under the same blocks and slots as the model's. See `rank_drafting.py`.

Legend: R = requests in the step, P = requests in one pass of the draft model, K = most drafts of a request.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import LayerCache
from octavo.contracts.schedule import Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.distributed.groups import Group
from octavo.models.interfaces import CausalLM
from octavo.sampling.sampler import Sampler
from octavo.worker.draft_progress import DraftProgress
from octavo.worker.graph import StepGraph
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.rank_drafting import RankDrafting, chunks, counts_of, pass_of
from octavo.worker.request_rows import DraftRows, RequestRows


class DraftModel(RankDrafting):
    """A model of its own, which reads tokens."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        graph: StepGraph | None,
        rows: RequestRows,
        tables: Sequence[int],
        progress: DraftProgress,
        sampler: Sampler,
        *,
        max_tokens: int,
        uses_processors: bool,
        ranks: Group,
    ) -> None:
        """`tables` are the numbers of the block tables of its KV groups."""
        seen = DraftRows(rows, model.config.kv_groups, [rows.block_tables[table] for table in tables])
        super().__init__(
            model,
            kv_caches,
            graph,
            rows,
            seen,
            sampler,
            max_tokens=max_tokens,
            uses_processors=uses_processors,
            ranks=ranks,
        )
        self._progress = progress

    def draw(self, step: SchedulerOutput) -> SchedulerOutput:
        """See `RankDrafting.draw`. Also computes the prompts in the step."""
        self.passes = []
        num_known, num_drawn = counts_of(step)
        followed = self._progress.apply(step, num_known)
        if not (len(followed) or num_drawn.any()):
            return step
        table = self._draw_table(step, num_known, num_drawn, followed)
        return self._filled_in(step, table, num_drawn) if num_drawn.any() else step

    def observe(self, step: SchedulerOutput, output: ModelRunnerOutput, aux: Sequence[torch.Tensor]) -> None:
        """No-op: it reads tokens, in the next step."""

    def _draw_table(
        self, step: SchedulerOutput, num_known: Int32Array, num_drawn: Int32Array, followed: NDArray[np.intp]
    ) -> Int32Array:
        """Run all passes; return the drafts [R, K]."""
        table = np.zeros((len(num_known), int(num_drawn.max())), dtype=np.int32)
        num_computed, rows = self._progress.num_computed, step.rows
        due = num_drawn > 0
        due[followed] = True
        at = due.nonzero()[0]
        starts = num_computed[rows[at]]
        ends = np.minimum(num_known[at], self.model.config.max_model_len)
        for part, offsets, counts in chunks(ends - starts, self._max_tokens):
            ends_of_part = starts[part] + offsets + counts
            samples = (ends_of_part == num_known[at[part]]) & (num_drawn[at[part]] > 0)
            self._pass(step, at[part], ends_of_part, counts, samples, table[:, :1])
        num_computed[rows[at]] = np.maximum(starts, ends)
        for column in range(1, table.shape[1]):
            at = (num_drawn > column).nonzero()[0]
            ones = np.ones(len(at), dtype=np.int32)
            self._pass(step, at, num_known[at] + column, ones, ones > 0, table[:, : column + 1])
            num_computed[rows[at]] = num_known[at] + column
        return table

    def _pass(
        self,
        step: SchedulerOutput,
        at: NDArray[np.intp],  # [P] in R
        ends: Int32Array,  # [P] of the context to compute
        counts: Int32Array,  # [P] tokens to compute, the last ones before `ends`
        samples: NDArray[np.bool_],  # [P]
        table: Int32Array,  # [R, .] drafts so far; the last column is filled here
    ) -> None:
        """Compute one batch of the draft model and sample from it."""
        start_s = time.perf_counter()
        tokens = pass_of(step, at, ends, counts, samples)
        batch = make_forward_batch(tokens, self._seen)
        vocab_size = self.model.config.vocab_size
        if vocab_size < self._rows.sampling.vocab_size:
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=vocab_size - 1))
        hidden = self._run(batch, None).hidden  # [T, D], or the kept rows
        if samples.any():
            self._sample_last(step.rows[at][samples], at[samples], ends[samples], batch.of_logits(hidden), table)
        self.passes.append((tokens.total_num_scheduled_tokens, time.perf_counter() - start_s))
