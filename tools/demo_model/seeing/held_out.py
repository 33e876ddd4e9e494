"""Pictures of held-out scenes with one question each: the same ones for everybody. Needs Pillow, nothing of Octavo."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image
from tools.demo_model.seeing.drawing import draw, random_size
from tools.demo_model.seeing.questions import Question, question
from tools.demo_model.seeing.redrawn import redraw
from tools.demo_model.seeing.scenes import SIMPLE, Range, Scene, scene

SEED = 2032  # of the card's scores: while a model is made, look at those of another one


@dataclass(frozen=True, kw_only=True)
class Item:
    """A picture, a question about it, and the answer."""

    picture: Image.Image
    question: Question
    scene: Scene


def held_out(
    task: str, count: int, within: Range = SIMPLE, *, redrawn: bool = False, seed: int = SEED
) -> Iterator[Item]:
    """Yield items of one task; `redrawn` ones look as nothing in training does."""
    rng = random.Random(f"{seed} {task} {within.things} {redrawn}")
    while count:
        drawn = scene(rng, within, held_out=True)
        asked = question(drawn, task, rng) if task in drawn.tasks else None
        if asked is not None:
            picture = redraw(drawn, rng) if redrawn else draw(drawn, random_size(rng), rng)[0]
            yield Item(picture=picture, question=asked, scene=drawn)
            count -= 1
