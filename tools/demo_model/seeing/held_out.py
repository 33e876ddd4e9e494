"""Pictures of held-out scenes with one question each: the same ones for everybody. Needs Pillow, nothing of Octavo."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image
from tools.demo_model.seeing.drawing import draw, random_size
from tools.demo_model.seeing.questions import Question, question
from tools.demo_model.seeing.scenes import SIMPLE, scene

SEED = 2026


@dataclass(frozen=True, kw_only=True)
class Item:
    """A picture, a question about it, and the answer."""

    picture: Image.Image
    question: Question


def held_out(task: str, count: int) -> Iterator[Item]:
    """Yield items of one task."""
    rng = random.Random(f"{SEED} {task}")
    while count:
        drawn = scene(rng, SIMPLE, held_out=True)
        asked = question(drawn, task, rng) if task in drawn.tasks else None
        if asked is not None:
            picture, _ = draw(drawn, random_size(rng), rng)
            yield Item(picture=picture, question=asked)
            count -= 1
