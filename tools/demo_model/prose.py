"""Plain text without the chat's marks, so that a completion of any prompt reads as text."""

import random
from pathlib import Path

from tools.demo_model.arithmetic import addition
from tools.demo_model.facts import FACTS
from tools.demo_model.sequences import copying, counting, sorting

PARAGRAPHS = tuple(Path(__file__).with_name("prose.txt").read_text().strip().split("\n\n"))
TASKS = (addition, sorting, copying, counting)


def paragraphs(rng: random.Random) -> str:
    """One to three paragraphs in any order."""
    return "\n\n".join(rng.sample(PARAGRAPHS, rng.randint(1, 3)))


def fact_page(rng: random.Random) -> str:
    """Some facts one after another, each as its answer alone."""
    return " ".join(fact.answer for fact in rng.sample(FACTS, rng.randint(1, 3)))


def lines(rng: random.Random) -> str:
    """Worked lines in plain text; what is held out in chats is left out here as well."""
    generate = rng.choice(TASKS)
    drawn = [example for example in (generate(rng) for _ in range(rng.randint(1, 6))) if not example.is_held_out]
    if generate is addition:
        return "\n".join(example.messages[-1]["content"] for example in drawn)
    return "\n".join(f"{example.messages[0]['content']}\n{example.messages[-1]['content']}" for example in drawn)


def raw_text(rng: random.Random) -> str:
    """A document of plain text."""
    return rng.choices((paragraphs, fact_page, lines), (4, 1, 1))[0](rng)
