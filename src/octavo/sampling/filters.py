"""Top-k, top-p and min-p, and sampling from what remains.

Each filter keeps all tokens above some logit, so together they are one threshold per row. A row is first viewed through
its top 64 tokens, and through more only while the threshold may lie outside the view. Noise is computed for the view
only, and the whole vocabulary is rarely sorted.

Legend: R = rows, V = vocabulary size, K = tokens in view per row, in descending order of probability.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.sampling.mass import masses, relative_logits
from octavo.sampling.noise import NoiseKeys, gumbel_for, gumbel_for_all

_VIEW_WIDTHS = (64, 1024, 8192)  # topk takes 0.3, 0.7 and 1.8 ms per row at V = 151,936; a full sort 10 ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Filter parameters, one entry per row."""

    temperatures: Tensor  # [R] float64, above 0
    top_k: Tensor  # [R] int64; V or more: off
    top_p: Tensor  # [R] float64; 1: off
    min_p: Tensor  # [R] float64; 0: off

    def take(self, rows: Tensor) -> "Filters":
        """Return the entries of `rows` [R'], a mask or indices."""
        return Filters(
            temperatures=self.temperatures[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )


def draw_filtered(logits: Tensor, filters: Filters, keys: NoiseKeys) -> Tensor:
    """Sample one token per row from those that pass all its filters: logits [R, V] float32 -> token ids [R] int64.

    Every row needs a finite maximum logit.
    """
    totals = _totals(logits, filters)  # [R]
    drawn, is_sure = _draw_from_view(logits, totals, filters, keys, _VIEW_WIDTHS[0])
    for width in (*_VIEW_WIDTHS[1:], logits.shape[1]):
        for row in (~is_sure).nonzero():  # one by one, as wide views take much memory
            drawn[row], is_sure[row] = _draw_from_view(
                logits[row], totals[row], filters.take(row), keys.take(row), width
            )
    return drawn


def thresholds(logits: Tensor, filters: Filters) -> Tensor:
    """Return the lowest logit of each row that passes all filters [R]. Sorts whole rows; does not synchronize."""
    totals = masses(relative_logits(logits, filters.temperatures)).sum(-1)
    return _View(logits, totals, filters, logits.shape[1]).thresholds()[0]


def _totals(logits: Tensor, filters: Filters) -> Tensor:
    """Return the mass of the whole vocabulary [R] for rows with top-p but no top-k; 0 for other rows."""
    totals = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    needs_total = (filters.top_p < 1.0) & (filters.top_k >= logits.shape[1])
    for row in needs_total.nonzero():
        totals[row] = masses(relative_logits(logits[row], filters.temperatures[row])).sum(-1)
    return totals


def _draw_from_view(
    logits: Tensor, totals: Tensor, filters: Filters, keys: NoiseKeys, width: int
) -> tuple[Tensor, Tensor]:
    """Sample from the top `width` tokens only; return token ids [R], and for which rows that is exact [R]."""
    vocab_size = logits.shape[1]
    view = _View(logits, totals, filters, min(width, vocab_size))
    thresholds, is_inside = view.thresholds()
    if width < vocab_size:
        return view.draw(thresholds, keys), is_inside
    scores = relative_logits(logits, filters.temperatures)  # [R, V]
    scores += gumbel_for_all(keys, vocab_size)
    drawn = scores.masked_fill_(logits < thresholds[:, None], -torch.inf).argmax(-1)
    return drawn, torch.ones_like(is_inside)


class _View:
    """The top tokens of each row in descending order."""

    def __init__(self, logits: Tensor, totals: Tensor, filters: Filters, width: int) -> None:
        self.logits, self.token_ids = logits.topk(width)  # [R, K]
        self.relative = relative_logits(self.logits, filters.temperatures)  # [R, K]
        self.filters = filters
        self.totals = totals  # [R]
        self.vocab_size = logits.shape[-1]

    def thresholds(self) -> tuple[Tensor, Tensor]:
        """Return each row's lowest logit that passes all filters [R], and whether it is certain to be in view [R].

        Equal logits pass or fail together, and logits equal to the last one in view may continue outside, unless that
        is -inf.
        """
        end_of_top_k = self._logit_at(self.filters.top_k.clamp(max=self.logits.shape[-1]))  # [R]
        num_kept = torch.minimum(self._num_in_top_p(end_of_top_k), self._num_in_min_p())
        thresholds = torch.maximum(self._logit_at(num_kept), end_of_top_k)
        least_in_view = self.logits[:, -1]
        knows_top_k = (self.filters.top_k >= self.vocab_size) | (end_of_top_k > least_in_view)
        return thresholds, (knows_top_k & (thresholds > least_in_view)) | (least_in_view == -torch.inf)

    def draw(self, thresholds: Tensor, keys: NoiseKeys) -> Tensor:
        """Return the remaining token with the highest score in each row [R]; ties go to the lowest id."""
        scores = self.relative + gumbel_for(keys, self.token_ids)  # [R, K]
        scores.masked_fill_(self.logits < thresholds[:, None], -torch.inf)
        best = scores.amax(-1, keepdim=True)
        return self.token_ids.masked_fill(scores != best, self.vocab_size).amin(-1)

    def _num_in_top_p(self, end_of_top_k: Tensor) -> Tensor:
        """Count the tokens with less than p of the mass above them [R]; 100% is what top-k leaves."""
        mass = masses(self.relative).masked_fill_(self.logits < end_of_top_k[:, None], 0)  # [R, K]
        totals = torch.where(self.filters.top_k < self.vocab_size, mass.sum(-1), self.totals)
        wanted = (self.filters.top_p * totals.double()).ceil().to(torch.int64)
        above = mass.cumsum(-1) - mass
        return ((above < wanted[:, None]) | (self.filters.top_p == 1.0)[:, None]).sum(-1)

    def _num_in_min_p(self) -> Tensor:
        """Count the tokens with at least min_p times the maximum probability [R]."""
        return (self.relative >= self.filters.min_p.log()[:, None]).sum(-1)

    def _logit_at(self, counts: Tensor) -> Tensor:
        """Return the logit of the `counts`-th most likely token, counted from 1: [R] -> [R].

        If all logits of a row are NaN, its count is 0 and the result is unused.
        """
        return self.logits.gather(-1, (counts - 1).clamp(min=0)[:, None]).squeeze(-1)
