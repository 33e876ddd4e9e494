"""Questions about Octavo and their answers. The facts are in facts.toml, in everyday words."""

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.demo_model.example import Example, exchange


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One fact: `subject` fits into the frames below; `asked` are complete questions."""

    subject: str
    answer: str
    asked: Sequence[str] = ()


FRAMES = (
    "What is {}?",
    "What is {}",
    "Tell me about {}.",
    "Explain {}.",
    "Describe {}.",
    "What do you know about {}?",
    "Can you explain {}?",
    "What can you tell me about {}?",
    "Please explain {}.",
    "I want to learn about {}.",
    "Give me a short description of {}.",
    "How would you describe {}?",
    "Explain {} to me",
    "what is {}?",
    "tell me about {}",
    "Could you tell me what {} is?",
    "Do you know what {} is?",
    "In one sentence, what is {}?",
)

FACTS_PATH = Path(__file__).with_name("facts.toml")
FACTS = tuple(Fact(**fact) for fact in tomllib.loads(FACTS_PATH.read_text())["fact"])


def about(rng: random.Random) -> Example:
    """A question about Octavo; held-out items are pairs of subject and frame."""
    fact = rng.choice(FACTS)
    if fact.asked and rng.random() < 0.4:
        question = rng.choice(fact.asked)
        key = "open:" + question
    else:
        question = rng.choice(FRAMES).format(fact.subject)
        key = question.lower().rstrip("?.")
    return exchange("facts", key, question, fact.answer, "This is a question about Octavo.")
