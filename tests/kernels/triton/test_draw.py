"""Triton draws the tokens that the definition draws, whatever the part of the vocabulary they are in."""

import numpy as np
import pytest
import torch
from tests.breadth import pick
from tests.kernels.triton.device import DEVICE

from octavo.kernels.triton import draw as module
from octavo.kernels.triton.draw import draw
from octavo.sampling.filters import relative_logits
from octavo.sampling.noise import gumbel_noise

NUM_ROWS = 5


def columns(seed: int) -> dict[str, torch.Tensor]:
    seeds = np.random.default_rng(seed).integers(0, 2**32, (2, NUM_ROWS))
    return {
        "temperatures": torch.tensor([1.0, 0.25, 1e-3, 0.0, 7.5], dtype=torch.float64, device=DEVICE),
        "seed_low": torch.from_numpy(seeds[0]).to(DEVICE),
        "seed_high": torch.from_numpy(seeds[1]).to(DEVICE),
        "output_indices": torch.tensor([0, 1, 2, 3, 2**31 - 1], device=DEVICE),
    }


def defined(logits: torch.Tensor, metadata: dict[str, torch.Tensor]) -> torch.Tensor:
    temperatures, low, high, indices = metadata.values()
    scores = relative_logits(logits, temperatures.clamp(min=1e-9))
    return (scores + gumbel_noise(low, high, indices, logits.shape[1])).argmax(-1)


def drawn_rows(found: torch.Tensor) -> list[int]:
    """Leave out the row of temperature 0."""
    return [token for row, token in enumerate(found.tolist()) if row != 3]


@pytest.mark.parametrize("vocab_size", pick([7, 1025], [1, 7, 1023, 1024, 1025, 3001]))
def test_tokens_are_those_of_the_definition(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAWN_PART", 1024)
    monkeypatch.setattr(module, "_QUADS", 64)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(DEVICE)
    if vocab_size > 2:
        logits[:, ::2] = -torch.inf  # masked
    for seed in range(pick(2, 4)):
        metadata = columns(seed)
        found = draw(logits, logits.amax(-1), **metadata)
        assert drawn_rows(found) == drawn_rows(defined(logits, metadata))


def test_a_row_of_another_seed_or_place_gets_another_token() -> None:
    """The comparison above would not see noise that ignores its key, if both sides did."""
    logits = torch.zeros(NUM_ROWS, pick(1001, 4001), device=DEVICE)
    metadata = columns(1)
    first = draw(logits, logits.amax(-1), **metadata).tolist()
    for name in ("seed_low", "seed_high", "output_indices"):
        other = draw(logits, logits.amax(-1), **{**metadata, name: metadata[name] ^ 1}).tolist()
        assert all(a != b for row, (a, b) in enumerate(zip(first, other, strict=True)) if row != 3)


def test_of_equal_scores_the_lowest_id_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAWN_PART", 1024)
    logits = torch.full((NUM_ROWS, 4000), -torch.inf, device=DEVICE)
    assert drawn_rows(draw(logits, torch.zeros(NUM_ROWS, device=DEVICE), **columns(0))) == [0, 0, 0, 0]
