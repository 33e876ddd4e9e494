"""Tokens come out as often as their probabilities say, over seeds and over output indices."""

import math

import numpy as np
import pytest
import torch
from tests.sampling import reference
from tests.sampling.support import Rows, sample, sample_rows

from octavo.sampling_params import SamplingParams

LOGITS = [2.0, -1.0, 0.5, 0.5, 1.2, -4.0, 0.0, 1.9]
NUM_DRAWS = 20_000
# Of chi-square with at most 7 degrees of freedom, one fair draw in a million exceeds this.
BOUND = 40.5


def chi_square(counts: torch.Tensor, probabilities: list[float]) -> float:
    """Return Pearson's statistic over the tokens that may occur; infinity if another one did."""
    expected = torch.tensor(probabilities, dtype=torch.float64) * counts.sum()
    possible = expected > 0
    if int(counts[~possible].sum()):
        return float("inf")
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def draws_of_one_seed(params: SamplingParams) -> torch.Tensor:
    """Return one request's first tokens, all from the same logits: [NUM_DRAWS]."""
    rows = Rows(1, len(LOGITS))
    rows.add(0, params.replace(seed=1234))
    logits = torch.tensor([LOGITS]).expand(NUM_DRAWS, -1).contiguous()
    step = rows.gather([0] * NUM_DRAWS, np.arange(NUM_DRAWS))
    return torch.from_numpy(sample_rows(rows, logits, step).token_ids)


def counts(token_ids: torch.Tensor) -> torch.Tensor:
    return token_ids.bincount(minlength=len(LOGITS))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1),
    ],
)
def test_counts_follow_the_distribution(params: SamplingParams) -> None:
    assert chi_square(counts(draws_of_one_seed(params)), reference.distribution(LOGITS, params)) < BOUND


def test_the_check_can_fail() -> None:
    """The same counts against a temperature 10 % off."""
    of_one = counts(draws_of_one_seed(SamplingParams()))
    assert chi_square(of_one, reference.distribution(LOGITS, SamplingParams(temperature=1.1))) > BOUND


def test_successive_tokens_are_independent() -> None:
    drawn = draws_of_one_seed(SamplingParams())
    repeats = float((drawn[1:] == drawn[:-1]).double().mean())
    expected = sum(p * p for p in reference.distribution(LOGITS, SamplingParams()))
    assert repeats == pytest.approx(expected, abs=5 / math.sqrt(NUM_DRAWS))


def test_first_tokens_of_neighboring_seeds_follow_the_distribution() -> None:
    params = SamplingParams()
    drawn = torch.from_numpy(sample(torch.tensor([LOGITS] * 2000), [params] * 2000).token_ids)
    assert chi_square(counts(drawn), reference.distribution(LOGITS, params)) < BOUND
