"""Questions about a scene, each in several phrasings and with one correct answer."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.demo_model.seeing.scenes import COLOURS, PLACES, SHAPES, Scene, Thing

PHRASINGS = {
    "count": (
        "How many {} are there?",
        "How many {} do you see?",
        "How many {} are in the picture?",
        "Count the {}.",
    ),
    "colour": ("What colour is the {}?", "What color is the {}?", "Which colour does the {} have?"),
    "shape": ("Which shape is {}?", "What shape is the {} one?", "What is the {} shape?"),
    "where": ("Where is the {}?", "Where do you see the {}?", "In which place is the {}?"),
    "what": ("What is {}?", "What do you see {}?", "Which shape is {}?"),
    "exists": ("Is there {}?", "Do you see {}?", "Does the picture show {}?"),
    "number": (
        "What number is this?",
        "Which number do you see?",
        "What number is in the picture?",
        "Read the number.",
    ),
    "describe": ("Describe the picture.", "What do you see?", "What is in the picture?", "Describe this image."),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and its answer."""

    task: str
    subject: str  # what is asked about
    text: str
    answer: str


def question(scene: Scene, task: str, rng: random.Random) -> Question | None:
    """Return a question of this task, if the scene has one."""
    made = list(_TASKS[task](scene, rng))
    if not made:
        return None
    subject, answer = rng.choice(made)
    return Question(task=task, subject=subject, text=rng.choice(PHRASINGS[task]).format(subject), answer=answer)


Subjects = Iterator[tuple[str, str]]  # what is asked about, and the answer


def _count(scene: Scene, rng: random.Random) -> Subjects:
    """Count all shapes, those of a kind or of a colour; rarely one that is not there."""
    yield "shapes", str(len(scene.things))
    shapes, colours = _counts(scene)
    for shape in dict.fromkeys([*shapes, rng.choice(SHAPES)]):
        yield f"{shape}s", str(shapes[shape])
    for colour in dict.fromkeys([*colours, rng.choice(list(COLOURS))]):
        yield f"{colour} shapes", str(colours[colour])


def _colour(scene: Scene, rng: random.Random) -> Subjects:
    """Ask for the colour of the number or of a shape that occurs once."""
    if scene.number:
        yield "number", scene.colour.capitalize()
    for thing in _only(scene, "shape"):
        yield thing.shape, thing.colour.capitalize()


def _shape(scene: Scene, rng: random.Random) -> Subjects:
    for thing in _only(scene, "colour"):
        yield thing.colour, f"A {thing.shape}"


def _where(scene: Scene, rng: random.Random) -> Subjects:
    for thing in _only(scene, "shape"):
        yield thing.shape, thing.where.capitalize()
    for thing in _only(scene, "colour"):
        yield f"{thing.colour} shape", thing.where.capitalize()
    for thing in _only(scene, "name"):
        yield thing.name, thing.where.capitalize()


def _what(scene: Scene, rng: random.Random) -> Subjects:
    for thing in scene.things:
        yield thing.where, _article(thing.name).capitalize()
    empty = set(range(len(PLACES))) - {thing.place for thing in scene.things}
    yield PLACES[rng.choice(sorted(empty))], "Nothing"


def _exists(scene: Scene, rng: random.Random) -> Subjects:
    """Ask for something that is there, and for something that differs in its shape or colour."""
    names = {thing.name for thing in scene.things}
    thing = rng.choice(scene.things)
    yield _article(thing.name), "Yes"
    other = rng.choice([f"{thing.colour} {rng.choice(SHAPES)}", f"{rng.choice(list(COLOURS))} {thing.shape}"])
    yield _article(other), "Yes" if other in names else "No"


def _number(scene: Scene, rng: random.Random) -> Subjects:
    yield "", scene.number


def _describe(scene: Scene, rng: random.Random) -> Subjects:
    if scene.number:
        yield "", f"The number {scene.number} in {scene.colour}."
    elif len(scene.things) == 1:
        yield "", f"{_article(scene.things[0].name).capitalize()}."
    else:
        told = ", ".join(f"{_article(thing.name)} {thing.where}" for thing in scene.things)
        yield "", f"{told.capitalize()}."


_TASKS: dict[str, Callable[[Scene, random.Random], Subjects]] = {
    "count": _count,
    "colour": _colour,
    "shape": _shape,
    "where": _where,
    "what": _what,
    "exists": _exists,
    "number": _number,
    "describe": _describe,
}
TASKS = tuple(_TASKS)


def _article(name: str) -> str:
    return f"{'an' if name.startswith('o') else 'a'} {name}"


def _counts(scene: Scene) -> tuple[Counter[str], Counter[str]]:
    return Counter(thing.shape for thing in scene.things), Counter(thing.colour for thing in scene.things)


def _only(scene: Scene, key: str) -> list[Thing]:
    """Return the things that no other one equals in this respect."""
    found = Counter(getattr(thing, key) for thing in scene.things)
    return [thing for thing in scene.things if found[getattr(thing, key)] == 1]
