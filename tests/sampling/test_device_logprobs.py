"""Log-probabilities in two halves: those of the definition, to the bit, by torch's ops and by Triton's kernels."""

import numpy as np
import pytest
import torch
from tests.kernels.triton.device import DEVICE
from triton import language as tl

from octavo.kernels.triton import logits as kernel
from octavo.sampling.logprobs import RATING_SIZE, rate_by_torch, read_rating
from octavo.sampling.logprobs import rate as rate_rows


@pytest.fixture(params=["torch", "triton"], autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", request.param)
    monkeypatch.setattr(kernel, "_PART", tl.constexpr(64))


def rows_of(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(5, vocab_size, generator=generator)
    noise[0] *= 5.0
    noise[1] = noise[1].round() * 0.5  # ties, zeros of both signs among them
    noise[2] = 0.0
    noise[3, 1:] = -torch.inf
    noise[4] *= 1e-40
    return noise.to(DEVICE)


@pytest.mark.parametrize("vocab_size", [1, 9, 64, 200])
def test_ratings_are_the_definitions(vocab_size: int) -> None:
    logits = rows_of(vocab_size)
    tokens = torch.arange(5, device=DEVICE) * 7 % vocab_size
    tokens[3] = 0
    are_needed = torch.tensor([20, 3, 0, 1, 20], device=DEVICE)
    max_logit = logits.amax(-1)
    ratings = rate_rows(logits, max_logit, tokens, are_needed).cpu().numpy()
    assert ratings.shape == (5, RATING_SIZE)
    for row, count in enumerate(are_needed.tolist()):
        found = read_rating(ratings[row], float(max_logit[row]), count, vocab_size)
        [defined] = rate_by_torch(logits[row : row + 1], tokens[row : row + 1], count).cpu().numpy()
        expected = read_rating(defined, float(max_logit[row]), count, vocab_size)
        assert (found.token_ids, found.rank) == (expected.token_ids, expected.rank)
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_a_token_that_the_model_excludes_is_rated_too() -> None:
    """A bias may bring it back; its own log-probability is that of nothing."""
    logits = rows_of(9)[3:4]
    max_logit, token = logits.amax(-1), torch.tensor([4], device=DEVICE)
    rating = rate_rows(logits, max_logit, token, torch.zeros(1, dtype=torch.int64, device=DEVICE))[0].cpu().numpy()
    found = read_rating(rating, float(max_logit), 0, 9)
    assert (found.token_ids, found.logprobs, found.rank) == ([4], [-np.inf], 2)


def test_what_is_not_finite_harms_no_other_row() -> None:
    logits = rows_of(200)
    tokens, are_needed = torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.full((5,), 2, device=DEVICE)
    expected = rate_rows(logits, logits.amax(-1), tokens, are_needed)
    logits[1, 3], logits[2, 4] = torch.nan, torch.inf
    found = rate_rows(logits, logits.amax(-1), tokens, are_needed)
    assert torch.equal(found[[0, 3, 4], :5], expected[[0, 3, 4], :5])
