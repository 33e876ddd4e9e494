"""The C++ kernels draw the tokens of the definition, on every level, and hand back what is too close for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import native
from tests.kernels.levels import LEVELS
from tests.sampling.support import Rows

from octavo.sampling.draw import SamplingMetadata, draw, draw_rows
from octavo.sampling.noise import gumbel_noise
from octavo.sampling_params import SamplingParams

VOCAB = 151_936
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 4000, "top_p": 0.5, "min_p": 0.001},
]


def metadata_of(params: list[SamplingParams], vocab_size: int) -> SamplingMetadata:
    rows = Rows(len(params), vocab_size)
    for row, row_params in enumerate(params):
        rows.add(row, row_params.replace(logprobs=0))  # else argmax needs no metadata
    step = rows.gather(range(len(params)))
    return replace(rows.metadata(step), output_indices=torch.arange(len(params)))


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_like_the_definition(level: str, logits: torch.Tensor, params: list[SamplingParams]) -> None:
    metadata = metadata_of(params, logits.shape[1])
    expected, expected_ids = draw(logits, metadata, is_filtered=True)
    max_logit, token_ids = draw(logits, metadata, is_filtered=True, native=native(level, 3))
    torch.testing.assert_close(max_logit, expected, rtol=0, atol=0, equal_nan=True)
    is_finite = expected.isfinite()
    assert torch.equal(token_ids[is_finite], expected_ids[is_finite])


@each("temperature", [0.0, 1e-3, 0.7, 1.0, 3.0])
@each("vocab_size", [1, 3, 64, 65, 1000, 9001])
@pytest.mark.parametrize("level", LEVELS)
def test_tokens_are_those_of_the_definition(level: str, vocab_size: int, temperature: float) -> None:
    """From flat rows to peaked ones, with every filter."""
    for at, spread in enumerate((0.0, 0.01, 1.0, 2.5, 8.0)):
        params = [SamplingParams(temperature=temperature, seed=2**40 * at + row, **FILTERS[row]) for row in range(10)]
        assert_like_the_definition(level, random(vocab_size + at, 10, vocab_size) * spread, params)


@pytest.mark.parametrize("level", LEVELS)
def test_a_large_vocabulary_is_drawn_from_as_defined(level: str) -> None:
    params = [SamplingParams(seed=2**63 + row, **FILTERS[row]) for row in range(10)]
    logits = random(1, 10, VOCAB) * 2.5
    logits[:, 100:110] += 8.0
    assert_like_the_definition(level, logits, params)


@pytest.mark.parametrize("level", LEVELS)
def test_noise_alone_decides_a_flat_row(level: str) -> None:
    """2,000 draws from equal logits: any wrong word, or one left out, gives another token."""
    assert_like_the_definition(level, torch.zeros(2000, 777), [SamplingParams(seed=seed) for seed in range(2000)])


@pytest.mark.parametrize("level", LEVELS)
def test_masks_and_ties_are_as_defined(level: str) -> None:
    """Rows of a few different logits, most of them banned."""
    logits = torch.randint(4, (30, 3001), generator=torch.Generator().manual_seed(2)) * 0.5
    logits = logits.masked_fill(torch.rand(30, 3001, generator=torch.Generator().manual_seed(3)) < 0.99, -torch.inf)
    params = [SamplingParams(seed=row, **FILTERS[row % 10]) for row in range(30)]
    assert_like_the_definition(level, logits, params)


@pytest.mark.parametrize("level", LEVELS)
@each("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_row(level: str, value: float) -> None:
    for token_id in (0, 700, 777):  # in whole slices, and in the one at the end
        logits = random(4, 4, 778)
        logits[1, token_id], logits[2] = value, -torch.inf
        assert_like_the_definition(level, logits, [SamplingParams(seed=row, top_p=0.9) for row in range(4)])


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_alone_is_that_row_in_any_batch_on_any_number_of_threads(level: str) -> None:
    logits = random(5, 10, 20_011) * 3
    wanted = draw_rows(metadata_of([SamplingParams(seed=row, **FILTERS[row]) for row in range(10)], 20_011))
    together, max_logit = native(level, 2).draw(logits, wanted)
    for num_threads in (1, 2, 3):
        for row in range(10):
            one = slice(row, row + 1)
            token_id, value = native(level, num_threads).draw(logits[one], wanted[one])
            assert (int(token_id), float(value)) == (int(together[row]), float(max_logit[row]))


def noise_of(seed: int, vocab_size: int) -> torch.Tensor:
    zero = torch.zeros(1, dtype=torch.int64)
    return gumbel_noise(torch.tensor([seed]), zero, zero, vocab_size)[0]


def assert_too_close(level: str, logits: torch.Tensor, params: SamplingParams) -> None:
    """The kernels hand the row back, and the definition draws it."""
    metadata = metadata_of([params], len(logits))
    assert native(level, 2).draw(logits[None], draw_rows(metadata))[0].tolist() == [-1]
    _, expected = draw(logits[None], metadata, is_filtered=True)
    assert torch.equal(draw(logits[None], metadata, is_filtered=True, native=native(level, 2))[1], expected)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_scores_are_left_to_the_definition(level: str) -> None:
    """Among 151,936 words of 32 bits some are equal; all other tokens are banned."""
    noise = noise_of(8, VOCAB)
    ordered, ids = noise.sort()
    twins = (ordered[1:] == ordered[:-1]).nonzero()[:, 0]
    assert len(twins)
    logits = torch.full((VOCAB,), -torch.inf)
    logits[ids[twins[0]]] = logits[ids[twins[0] + 1]] = 0.0
    assert_too_close(level, logits, SamplingParams(seed=8))


@pytest.mark.parametrize("level", LEVELS)
@each("seed", range(5))
def test_scores_that_differ_by_a_rounding_are_left_to_the_definition(level: str, seed: int) -> None:
    """A temperature that makes up for the difference between two tokens' noise."""
    noise = noise_of(seed, 2)
    logits = torch.zeros(2)
    logits[noise.argmax()] = -1.0
    assert_too_close(level, logits, SamplingParams(seed=seed, temperature=1.0 / float((noise[0] - noise[1]).abs())))


@pytest.mark.parametrize("level", LEVELS)
def test_a_mass_on_the_edge_of_top_p_is_left_to_the_definition(level: str) -> None:
    logits = torch.tensor([0.0, 0.0, -1.0, -1.0])
    top_p = 1.0 / (1.0 + float(torch.tensor(-1.0, dtype=torch.float64).exp()))
    assert_too_close(level, logits, SamplingParams(seed=1, top_p=top_p))
    assert_too_close(level, logits, SamplingParams(seed=1, top_p=top_p, top_k=3))
