"""Shared by all drafters in ranks: passes of a small model over tokens of some rows, and drafts sampled from them.

A draft is sampled as the model will sample that position, with the same seed and output index, hence the same noise: so
sampled drafts match as often as the two distributions allow.

Every rank runs the whole draft model, even with tensor parallelism and pipeline stages: nothing is communicated, and a
pass can be recorded.

Legend: R = requests in the step, P = requests in a pass, S = those that it samples, K = most drafts of a request,
D = hidden size, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import ForwardBatch, LayerCache
from octavo.contracts.schedule import DRAWN_IN_RANKS, CachedRequestData, Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.distributed.groups import Group
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.sampling.sampler import Sampler
from octavo.worker.graph import StepGraph
from octavo.worker.request_rows import DraftRows, RequestRows


class RankDrafting(ABC):
    """Owned by a runner."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        graph: StepGraph | None,
        rows: RequestRows,
        seen: DraftRows,
        sampler: Sampler,
        *,
        max_tokens: int,
        uses_processors: bool,
        ranks: Group,
    ) -> None:
        """`seen` are `rows` as the model sees them; a pass computes at most `max_tokens`.

        With `uses_processors`, penalties and bans apply to drafts, too: every rank must then know every token at once.
        """
        self.model = model
        self.passes: list[tuple[int, float]] = []  # of the last step: tokens and seconds of each
        self._kv_caches, self._graph = kv_caches, graph
        self._rows, self._seen, self._sampler = rows, seen, sampler
        self._max_tokens, self._uses_processors, self._ranks = max_tokens, uses_processors, ranks

    @abstractmethod
    def draw(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return the step with its drafts filled in. The rows must be up to date with it."""

    @abstractmethod
    def observe(self, step: SchedulerOutput, output: ModelRunnerOutput, aux: Sequence[torch.Tensor]) -> None:
        """Read the results of a step: its output, and `IntermediateTensors.aux`."""

    def _run(self, batch: ForwardBatch, incoming: IntermediateTensors | None) -> IntermediateTensors:
        if self._graph is not None:
            return self._graph.run(batch, incoming)
        return self.model.run_stage(batch, self._kv_caches, incoming)

    def _sample_last(
        self, rows: Int32Array, requests: NDArray[np.intp], ends: Int32Array, hidden: torch.Tensor, table: Int32Array
    ) -> None:
        """Sample from hidden [S, D] the tokens at positions `ends` [S], into the last column of the drafts [R, .]."""
        before = {index: table[request, :-1].tolist() for index, request in enumerate(requests.tolist())}
        wanted = self._rows.sampling.vocab_size
        if self._sampler.guesses_by_argmax(rows, with_processors=self._uses_processors):
            _, token_ids = self.model.logits_argmax(hidden)
            chosen = token_ids.clamp(max=wanted - 1)
        else:
            logits = _of_width(self.model.compute_logits(hidden), wanted)
            output_indices = ends - self._rows.num_prompt_tokens[rows]
            chosen = self._sampler.guess(logits, rows, output_indices, before, with_processors=self._uses_processors)
        table[requests, -1] = chosen.cpu().numpy()
        self._rows.write_sampled(rows, ends, chosen)

    def _filled_in(self, step: SchedulerOutput, table: Int32Array, num_drawn: Int32Array) -> SchedulerOutput:
        """Return the step with the drafts of `table` [R, K] in place of the placeholders."""
        drafts = step.scheduled_spec_decode_tokens
        assert drafts is not None, "there are places to fill"
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


def counts_of(step: SchedulerOutput) -> tuple[Int32Array, Int32Array]:
    """Return how many tokens each request has before its drafts [R], and how many drafts to draw for it [R]."""
    num_known = step.num_computed_tokens + step.num_scheduled_tokens
    drafts = step.scheduled_spec_decode_tokens
    if drafts is None:
        return num_known, np.zeros_like(num_known)
    owners = np.repeat(np.arange(len(num_known)), drafts.counts)
    is_drawn = drafts.token_ids == DRAWN_IN_RANKS
    num_drawn = np.bincount(owners[is_drawn], minlength=len(num_known)).astype(np.int32)
    return num_known - drafts.counts, num_drawn


def pass_of(
    step: SchedulerOutput,
    at: NDArray[np.intp],  # [P] in R
    ends: Int32Array,  # [P] of the context to compute
    counts: Int32Array,  # [P] tokens to compute, the last ones before `ends`
    samples: NDArray[np.bool_],  # [P]
) -> SchedulerOutput:
    """Return the scheduler output of one pass."""
    return SchedulerOutput(
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


def chunks(sizes: Int32Array, most: int) -> Iterator[tuple[NDArray[np.intp], Int32Array, Int32Array]]:
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
