"""Seeds make sampling repeatable. Requests without a seed are given one when they enter the engine."""

import secrets

SEED_BITS = 64
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_STEP = 0x9E3779B97F4A7C15


def draw_seed() -> int:
    """Draw 64 random bits from the operating system."""
    return secrets.randbits(SEED_BITS)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request: `seed` itself for sample 0, 64 well-mixed bits for the others.

    Different indices give different seeds, because every step below is a bijection. Source: SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    if index == 0:
        return seed
    mixed = (seed + index * _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
