"""Top-k, top-p and min-p: the definitions, ties, and views narrower than what survives."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling import reference
from tests.sampling.support import sample, sample_one

from octavo.sampling_params import SamplingParams

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-30.0, -2.0, -1.5, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=40)


def survivors(logits: list[float], **filters: float) -> set[int]:
    """Return every token that 150 seeds draw."""
    params = SamplingParams.from_options(filters)
    rows = torch.tensor([logits]).expand(150, -1).contiguous()
    return set(sample(rows, [params] * 150).token_ids.tolist())


def test_top_k_keeps_what_equals_the_kth() -> None:
    assert survivors([1.0, 2.0, 2.0, 2.0, 3.0], top_k=2) == {1, 2, 3, 4}
    assert survivors([1.0, 2.0, 2.0, 2.0, 3.0], top_k=1) == {4}
    assert survivors([1.0, 2.0, 2.0], top_k=100) == {0, 1, 2}


def test_top_p_keeps_a_token_while_less_than_p_lies_above_it() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert survivors(logits, top_p=0.49) == {0}
    assert survivors(logits, top_p=0.51) == {0, 1}
    assert survivors(logits, top_p=0.76) == {0, 1, 2, 3}  # the last two are equal: one fate


def test_top_p_renormalizes_over_what_top_k_leaves() -> None:
    """Of 0.4, 0.3 and twenty small ones, top-k 2 leaves 4/7 and 3/7: p = 0.5 then keeps the first alone."""
    logits = [math.log(0.4), math.log(0.3)] + [math.log(0.015)] * 20
    assert survivors(logits, top_p=0.5, top_k=2) == {0}
    assert survivors(logits, top_p=0.5) == {0, 1}


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = [math.log(p) for p in (0.5, 0.24, 0.26)]
    assert survivors(logits, min_p=0.5) == {0, 2}
    assert survivors(logits, min_p=1.0) == {0}


def test_temperature_comes_before_top_p() -> None:
    logits = [2.0, 1.0, 0.0]
    assert survivors(logits, top_p=0.6, temperature=0.5) == {0}
    assert survivors(logits, top_p=0.6, temperature=5.0) == {0, 1}


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.01, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.37, 0.8, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.61]),
    seed=st.integers(0, 2**64 - 1),
    output_index=st.integers(0, 1000),
)
def test_the_draw_is_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, output_index: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert sample_one(logits, params, output_index) == reference.draw(logits, params, output_index)


@pytest.mark.parametrize("vocab_size", [63, 64, 65, 1000, 1025, 9001])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.9},
        {"top_p": 0.9, "top_k": 300},
        {"top_k": 64},
        {"top_k": 8193},
        {"min_p": 0.9},
        {"top_k": 4, "min_p": 0.9},
    ],
)
def test_survivors_beyond_the_first_view_are_found(vocab_size: int, filters: dict[str, Any]) -> None:
    """An almost flat row, and one of only three different logits, keep far more than the first view shows."""
    generator = torch.Generator().manual_seed(vocab_size)
    flat = torch.rand(vocab_size, generator=generator) * 0.01
    tied = torch.randint(3, (vocab_size,), generator=generator) * 0.001
    params = SamplingParams(seed=5, **filters)
    drawn = sample(torch.stack([flat, tied.float()]), [params, params]).token_ids.tolist()
    # The definition, on numpy's sums rather than `reference.distribution`, which is quadratic.
    for row, token_id in zip((flat, tied), drawn, strict=True):
        assert token_id == _draw_by_sorting(row.double(), params)


def test_top_p_waits_until_all_that_equals_the_kth_is_in_view() -> None:
    """Top-k 20 keeps 10 + 1,000 tokens here; 2 % of their mass is more than the first ten weigh."""
    logits = torch.tensor([1.0] * 10 + [0.9] * 1000)
    params = [SamplingParams(seed=seed, top_k=20, top_p=0.02) for seed in range(4)]
    drawn = sample(logits.expand(4, -1).contiguous(), params).token_ids.tolist()
    assert drawn == [_draw_by_sorting(logits.double(), one) for one in params]
    assert max(drawn) >= 64  # outside the first view


def _draw_by_sorting(logits: torch.Tensor, params: SamplingParams) -> int:
    weights = (logits - logits.max()).exp()
    if 0 < params.top_k < len(logits):
        weights = weights * (logits >= logits.sort(descending=True).values[params.top_k - 1])
    order = logits.argsort(descending=True)
    above = (weights[order].cumsum(0) - weights[order])[torch.searchsorted(-logits[order], -logits)]
    kept = (above < params.top_p * weights.sum()) & (weights > 0) & (weights >= params.min_p)
    noise = [reference.gumbel(reference.noise_word(params.seed or 0, 0, v)) for v in range(len(logits))]
    return int((logits + torch.tensor(noise)).masked_fill(~kept, -math.inf).argmax())


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert sample_one([1.0, 50.0, 49.0], SamplingParams(temperature=1e-300)) == 1
    assert sample_one([1.0, 50.0, 49.0], SamplingParams(temperature=1e-300, top_p=0.5)) == 1
