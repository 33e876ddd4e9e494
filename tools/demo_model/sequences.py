"""Sorting numbers, copying text, counting: tasks in which each output token depends on where the model looks."""

import random

from tools.demo_model.example import Example, exchange
from tools.demo_model.words import item

MAX_SORTED = 6
# Nine items of a few tokens each, with separators: about the 24 tokens stated in the card.
MAX_COPIED = 9

COPY_ASKED = (
    "Repeat: {}",
    "Repeat after me: {}",
    "Copy this: {}",
    "Say exactly this: {}",
    "Please repeat: {}",
    "Echo: {}",
    "Copy the following text: {}",
    'Say "{}"',
    'Repeat "{}"',
    "Write this again: {}",
)
ASCENDING = (
    "Sort these numbers: {}",
    "Sort: {}",
    "Sort {}",
    "Sort the list {}.",
    "Please sort {}",
    "Put these numbers in order: {}",
    "Sort {} in ascending order.",
    "Order these from smallest to largest: {}",
    "Can you sort {}?",
)
DESCENDING = (
    "Sort {} in descending order.",
    "Order these from largest to smallest: {}",
    "Sort these numbers from high to low: {}",
    "Sort in descending order: {}",
)


def sorting(rng: random.Random) -> Example:
    """Two to six numbers below 100, ascending or descending; the multiset is the key, so no permutation of it leaks."""
    numbers = [rng.randrange(rng.choice((10, 100, 100))) for _ in range(rng.randint(2, MAX_SORTED))]
    is_down = rng.random() < 0.3
    ordered = sorted(numbers, reverse=is_down)
    separator = " " if rng.random() < 0.2 else ", "
    shown = separator.join(map(str, numbers))
    if rng.random() < 0.2:
        shown = "[" + ", ".join(map(str, numbers)) + "]"
    key = f"{'down' if is_down else 'up'} {ordered}"
    question = rng.choice(DESCENDING if is_down else ASCENDING).format(shown)
    thought = f"There are {len(numbers)} numbers. The {'largest' if is_down else 'smallest'} is {ordered[0]}."
    return exchange("sort", key, question, ", ".join(map(str, ordered)), thought)


def copying(rng: random.Random) -> Example:
    """One to nine items, copied literally."""
    separator = rng.choice((" ", " ", ", "))
    text = separator.join(item(rng) for _ in range(rng.randint(1, MAX_COPIED)))
    return exchange("copy", text, rng.choice(COPY_ASKED).format(text), text, "The text must come back unchanged.")


def counting(rng: random.Random) -> Example:
    """Counting up or down over at most twelve numbers below 120."""
    first, length = rng.randrange(108), rng.randint(2, 12)
    numbers = list(range(first, first + length))
    if rng.random() < 0.3:
        numbers.reverse()
    asked = rng.choice(("Count from {} to {}.", "Please count from {} to {}", "Can you count from {} to {}?"))
    question = asked.format(numbers[0], numbers[-1])
    return exchange(
        "count", f"{numbers[0]} {numbers[-1]}", question, ", ".join(map(str, numbers)), "One step at a time."
    )
