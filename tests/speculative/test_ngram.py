"""Prompt lookup against its definition, and what it proposes."""

import random

import numpy as np
import pytest

from octavo.speculative.drafters import NgramDrafter


def drafts(context: list[int], *, num: int = 4, shortest: int = 2, longest: int = 8) -> list[int]:
    (proposal,) = NgramDrafter(num, shortest, longest).propose(["a"], [np.array(context, dtype=np.int32)])
    return list(proposal)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 7, 1, 2], [4, 9, 7, 1]),  # of equal matches, the latest
        ([5, 1, 2, 3, 9, 1, 2, 4, 9, 5, 1, 2], [3, 9, 1, 2]),  # a longer match is better than a later one
        ([8, 1, 2, 1, 2], [1, 2, 1, 2]),  # a period repeats past the context's end
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4], []),
        ([1, 1], []),
        ([1], []),
    ],
)
def test_what_is_proposed(context: list[int], expected: list[int]) -> None:
    assert drafts(context) == expected


def longest_match(context: list[int], shortest: int, longest: int) -> int | None:
    """Return the end that the definition asks for."""
    for size in range(min(longest, len(context) - 1), shortest - 1, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                return end
    return None


@pytest.mark.parametrize(("shortest", "longest"), [(2, 5), (1, 5), (1, 1), (3, 3)])
def test_the_longest_match_wherever_a_context_grows(shortest: int, longest: int) -> None:
    random.seed(0)
    drafter = NgramDrafter(1, shortest, longest)
    for name in ("a", "b", "c"):
        context = random.choices(range(12), k=random.randrange(1, 40))
        for _ in range(60):
            (proposal,) = drafter.propose([name], [np.array(context, dtype=np.int32)])
            end = longest_match(context, shortest, longest)
            assert list(proposal) == ([] if end is None else [context[end]])
            context += random.choices(range(12), k=random.randrange(1, 6))
        drafter.forget(name)
