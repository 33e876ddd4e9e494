"""Plain text without chat markup: prose, so that completions of any prompt read as text, and pages of sums."""

import random
from pathlib import Path

from tools.demo_model.arithmetic import addition, subtraction
from tools.demo_model.facts import FACTS

PARAGRAPHS = tuple(Path(__file__).with_name("prose.txt").read_text().strip().split("\n\n"))


def paragraphs(rng: random.Random) -> str:
    """Return one to three paragraphs in random order."""
    return "\n\n".join(rng.sample(PARAGRAPHS, rng.randint(1, 3)))


def fact_page(rng: random.Random) -> str:
    """Return several facts as consecutive sentences."""
    return " ".join(fact.answer for fact in rng.sample(FACTS, rng.randint(1, 3)))


def raw_text(rng: random.Random) -> str:
    """Return a document of plain text."""
    return rng.choices((paragraphs, fact_page), (4, 1))[0](rng)


def drill(rng: random.Random) -> str:
    """Return sums and differences, one per line: thrice as many per token as in chats. Teaches carrying."""
    drawn = [rng.choice((addition, subtraction))(rng) for _ in range(rng.randint(3, 16))]
    return "\n".join(example.messages[-1]["content"] for example in drawn if not example.is_held_out)
