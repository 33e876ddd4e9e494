"""Noise: the published vectors, accuracy at both ends, and independence of the batch and the threads."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling import reference

from octavo.sampling.noise import gumbel_noise, gumbel_of, philox4x32

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "philox_vectors.json").read_text())
SEEDS = st.integers(0, 2**64 - 1)
INDICES = st.integers(0, 2**31 - 1)


def keys_of(*rows: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of noise for (seed, output index) pairs."""
    seeds = [seed for seed, _ in rows]
    low, high = ([seed & reference.WORD for seed in seeds], [seed >> 32 for seed in seeds])
    return torch.tensor(low), torch.tensor(high), torch.tensor([index for _, index in rows])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run a test on one thread and give the others back."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("vector", VECTORS["philox4x32_10"])
def test_philox_gives_the_published_words(vector: dict[str, list[str]]) -> None:
    counter, key, words = ([int(word, 16) for word in vector[name]] for name in ("counter", "key", "words"))
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))] == words
    assert reference.philox4x32(counter, key) == words


@pytest.mark.parametrize("vector", VECTORS["noise"])
def test_noise_vectors_are_what_the_sampler_uses(vector: dict[str, Any]) -> None:
    seed, index, token_id = vector["seed"], vector["output_index"], vector["token_id"]
    assert reference.noise_word(seed, index, token_id) == int(vector["word"], 16)
    noise = gumbel_noise(*keys_of((seed, index)), token_id + 1)[0, token_id]
    assert float(noise) == pytest.approx(vector["gumbel"], rel=1e-14)


@given(seed=SEEDS, index=INDICES, token_id=st.integers(0, 2**16))
def test_noise_is_the_reference_for_any_key(seed: int, index: int, token_id: int) -> None:
    noise = gumbel_noise(*keys_of((seed, index)), token_id + 1)[0, token_id]
    assert float(noise) == pytest.approx(reference.gumbel(reference.noise_word(seed, index, token_id)), rel=1e-14)


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_noise_is_accurate_at_both_ends(word: int) -> None:
    with localcontext() as context:
        context.prec = 60
        exact = -(-((Decimal(word) + Decimal("0.5")) / 2**32).ln()).ln()
    assert float(gumbel_of(torch.tensor(word))) == pytest.approx(float(exact), rel=1e-15, abs=1e-15)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 1021, 151_937])
def test_a_row_has_the_same_bits_alone_and_among_others(vocab_size: int) -> None:
    rows = [(7, 0), (7, 1), (2**63 + 5, 40), (0, 9)]
    together = gumbel_noise(*keys_of(*rows), vocab_size)
    assert together.shape == (4, vocab_size)
    assert together.isfinite().all()
    for at, row in enumerate(rows):
        assert torch.equal(gumbel_noise(*keys_of(row), vocab_size)[0], together[at])


@pytest.mark.usefixtures("one_thread")
def test_threads_do_not_show() -> None:
    keys = keys_of((3, 4), (5, 6))
    alone = gumbel_noise(*keys, 151_936)
    torch.set_num_threads(2)
    assert torch.equal(gumbel_noise(*keys, 151_936), alone)


def test_noise_is_distributed_as_gumbel() -> None:
    """Mean is Euler's constant and variance pi^2 / 6, each within five standard errors for 400,000 draws."""
    noise = gumbel_noise(*keys_of(*[(seed, 0) for seed in range(4)]), 100_000)
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=5 * 1.2825 / math.sqrt(noise.numel()))
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=5 * 3.5 / math.sqrt(noise.numel()))
