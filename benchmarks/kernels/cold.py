"""Copies that take turns, so that a kernel finds its weights or KV as cold as a model's layer does."""

COLD_BYTES = 1 << 29


def num_copies(num_bytes: int) -> int:
    """Return how many copies of so many bytes are together larger than caches, but no more than 64."""
    return max(2, min(64, COLD_BYTES // num_bytes))
