"""Passages of 128 tokens, and the time an engine takes to make vectors of them. Needs no package."""

import random
import time
from collections.abc import Callable

NUM_WORDS = 128  # each a token of `benchmarks.offline.vectors`' tokenizer
VOCAB_SIZE = 30000  # words that passages are made of
_NUM_COMPARED = 8

# Takes passages, returns a vector of each.
Embed = Callable[[list[str]], list[list[float]]]


def passages(count: int, seed: int) -> list[str]:
    source = random.Random(seed)
    return [" ".join(f"w{source.randrange(100, VOCAB_SIZE)}" for _ in range(NUM_WORDS)) for _ in range(count)]


def measure(count: int, embed: Embed) -> dict[str, object]:
    """Return passages a second, memory being warm, and the first vectors."""
    embed(passages(min(count, 32), seed=1))
    texts = passages(count, seed=2)
    begun_s = time.perf_counter()
    vectors = embed(texts)
    return {"passages_per_s": count / (time.perf_counter() - begun_s), "vectors": vectors[:_NUM_COMPARED]}
