"""Seeds: 64 bits, drawn afresh, and siblings that differ."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling_params import derive_seed, draw_seed


def test_drawn_seeds_are_64_bits_and_differ() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**62


@given(st.integers(0, 2**64 - 1))
def test_sample_0_keeps_the_seed_and_siblings_differ(seed: int) -> None:
    siblings = [derive_seed(seed, index) for index in range(50)]
    assert siblings[0] == seed
    assert len(set(siblings)) == 50
    assert all(0 <= sibling < 2**64 for sibling in siblings)


def test_derived_seeds_follow_splitmix64() -> None:
    """The first outputs of the published generator from state 0."""
    assert [derive_seed(0, index) for index in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_neighboring_seeds_have_unrelated_siblings() -> None:
    siblings = {derive_seed(seed, index) for seed in range(100) for index in range(1, 100)}
    assert len(siblings) == 100 * 99
