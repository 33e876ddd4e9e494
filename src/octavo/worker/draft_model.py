"""The draft model of a rank: it draws the drafts of a step before the model verifies them.

It has its own keys and values in the same blocks and slots as the model. A draft is sampled as the model will sample
that position, with the same seed and output index, hence the same noise: so sampled drafts match as often as the two
distributions let them.

Every rank runs the whole draft model, also with tensor parallelism and pipeline stages: nothing is communicated, and a
step can be recorded.

Legend: R = requests in the step, P = requests in one pass of the draft model, S = those that it samples, K = most
drafts of a request, V = vocabulary.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import LayerCache
from octavo.contracts.schedule import (
    DRAWN_IN_RANKS,
    CachedRequestData,
    Int32Array,
    SchedulerOutput,
    SpecDecodeTokens,
)
from octavo.distributed.groups import Group
from octavo.models.interfaces import CausalLM
from octavo.sampling.sampler import Sampler
from octavo.worker.draft_progress import DraftProgress
from octavo.worker.graph import StepGraph
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.logits_rows import LogitsRows
from octavo.worker.request_rows import DraftRows, RequestRows


class DraftModel:
    """Owned by a runner."""

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
        """`tables` are the numbers of the block tables of its KV groups; a pass computes at most `max_tokens`.

        With `uses_processors`, penalties and bans apply to drafts, too: every rank must then know every token at once.
        """
        self.model = model
        self.passes: list[tuple[int, float]] = []  # of the last step: tokens and seconds of each
        self._kv_caches, self._graph = kv_caches, graph
        self._rows, self._progress, self._sampler = rows, progress, sampler
        self._seen = DraftRows(rows, model.config.kv_groups, [rows.block_tables[table] for table in tables])
        self._max_tokens, self._uses_processors, self._ranks = max_tokens, uses_processors, ranks

    def draw(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return the step with its drafts filled in; follow the prompts in it. The rows must be up to date with it."""
        drafts, self.passes = step.scheduled_spec_decode_tokens, []
        num_known = step.num_computed_tokens + step.num_scheduled_tokens  # [R]
        num_drawn = np.zeros_like(num_known)  # [R]
        if drafts is not None:
            num_known = num_known - drafts.counts
            owners = np.repeat(np.arange(len(num_known)), drafts.counts)
            is_drawn = drafts.token_ids == DRAWN_IN_RANKS
            num_drawn = np.bincount(owners[is_drawn], minlength=len(num_known)).astype(np.int32)
        followed = self._progress.apply(step, num_known)
        if not (len(followed) or num_drawn.any()):
            return step
        table = self._draw_table(step, num_known, num_drawn, followed)
        return self._filled_in(step, drafts, table, num_drawn) if drafts is not None and num_drawn.any() else step

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
        for part, offsets, counts in _chunks(ends - starts, self._max_tokens):
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
        tokens = SchedulerOutput(
            step=step.step,
            req_ids=(),
            rows=step.rows[at],
            num_computed_tokens=ends - counts,
            num_scheduled_tokens=counts,
            samples=samples,
            total_num_scheduled_tokens=int(counts.sum()),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(),
            finished_req_ids=[],
        )
        batch = make_forward_batch(tokens, self._seen)
        vocab_size = self.model.config.vocab_size
        if vocab_size < self._rows.sampling.vocab_size:
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=vocab_size - 1))
        if self._graph is not None:
            hidden = self._graph.run(batch, None).hidden  # [T, D], or the kept rows
        else:
            hidden = self.model.run_stage(batch, self._kv_caches, None).hidden
        if samples.any():
            sampled = at[samples]
            logits_rows = LogitsRows.of(tokens)
            before = {index: table[request, :-1].tolist() for index, request in enumerate(sampled.tolist())}
            chosen = self._sample(logits_rows, batch.of_logits(hidden), before)  # [S]
            table[sampled, -1] = chosen.cpu().numpy()
            self._rows.write_sampled(logits_rows.rows, logits_rows.ends, chosen)
        self.passes.append((tokens.total_num_scheduled_tokens, time.perf_counter() - start_s))

    def _sample(
        self, logits_rows: LogitsRows, hidden: torch.Tensor, before: Mapping[int, Sequence[int]]
    ) -> torch.Tensor:
        """Sample from hidden [S, D] after the drafts `before`: ids [S] of the model's vocabulary."""
        rows, wanted = logits_rows.rows, self._rows.sampling.vocab_size
        if self._sampler.guesses_by_argmax(rows, with_processors=self._uses_processors):
            _, token_ids = self.model.logits_argmax(hidden)
            return token_ids.clamp(max=wanted - 1)
        logits = _of_width(self.model.compute_logits(hidden), wanted)
        output_indices = logits_rows.ends - self._rows.num_prompt_tokens[rows]
        return self._sampler.guess(logits, rows, output_indices, before, with_processors=self._uses_processors)

    def _filled_in(
        self, step: SchedulerOutput, drafts: SpecDecodeTokens, table: Int32Array, num_drawn: Int32Array
    ) -> SchedulerOutput:
        """Return the step with the drafts of `table` [R, K] in their places."""
        if self._ranks.size > 1:  # those of the first rank, should processors differ in their last bits
            mine = torch.from_numpy(table).to(self._rows.device, torch.float32)
            table = self._ranks.all_gather(mine, [table.shape[1]] * self._ranks.size).cpu().numpy()
        token_ids = drafts.token_ids.copy()
        columns = np.arange(table.shape[1])
        token_ids[token_ids == DRAWN_IN_RANKS] = table[columns < num_drawn[:, None]]
        filled = replace(step, scheduled_spec_decode_tokens=replace(drafts, token_ids=token_ids))
        if self._ranks.size > 1:
            self._rows.take_drafts(filled)
        return filled


def _chunks(sizes: Int32Array, most: int) -> Iterator[tuple[NDArray[np.intp], Int32Array, Int32Array]]:
    """Divide runs of `sizes` [P] tokens into batches of at most `most`: which runs, from where, how many of each."""
    ends = np.cumsum(np.maximum(sizes, 0))
    starts = ends - np.maximum(sizes, 0)
    for first in range(0, int(ends[-1]), most):
        begin, end = (np.clip(place, starts, ends) - starts for place in (first, first + most))
        part = (end > begin).nonzero()[0]
        yield part, begin[part].astype(np.int32), (end - begin)[part].astype(np.int32)


def _of_width(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Return logits [S, V] for `size` tokens: vocabularies of one tokenizer are padded in different ways."""
    missing = size - logits.shape[1]
    if missing <= 0:
        return logits[:, :size].contiguous()
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
