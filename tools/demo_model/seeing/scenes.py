"""What is in a picture: up to four shapes on a grid of nine places, or a number. Some scenes are never trained on."""

import random
from dataclasses import dataclass

from tools.demo_model.example import is_held_out

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 40),
    "orange": (245, 125, 20),
    "purple": (135, 50, 170),
    "black": (20, 20, 20),
}
# Row by row, with the words that a sentence has before them.
PLACES = (
    "at the top left",
    "at the top",
    "at the top right",
    "on the left",
    "in the centre",
    "on the right",
    "at the bottom left",
    "at the bottom",
    "at the bottom right",
)
CENTRE = 4


@dataclass(frozen=True, kw_only=True, order=True)
class Thing:
    """A shape in a place."""

    place: int  # of PLACES
    shape: str
    colour: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def where(self) -> str:
        return PLACES[self.place]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Either things, in the order of their places, or a number and its colour."""

    things: tuple[Thing, ...] = ()
    number: str = ""
    colour: str = ""

    @property
    def tasks(self) -> tuple[str, ...]:
        """What can be asked about it."""
        if self.number:
            return ("number", "colour", "describe")
        return ("count", "colour", "shape", "where", "what", "exists", "describe")

    @property
    def is_held_out(self) -> bool:
        """Whether no training picture shows it, at any size."""
        if self.number:
            return is_held_out("number", f"{self.number} {self.colour}")
        return is_held_out("shapes", " ".join(f"{thing.name} {thing.place}" for thing in self.things))


@dataclass(frozen=True, kw_only=True)
class Range:
    """How much scenes may show."""

    things: int
    numbers: int
    alone: float = 0.0  # the share of pictures that have just one thing, or one digit
    reading: float = 1 / 4  # the share of numbers
    crowded: bool = False  # whether the others have many things rather than few


SIMPLE = Range(things=1, numbers=10)  # what the model is meant to know
BROAD = Range(things=4, numbers=100)
MOSTLY_ONE = Range(things=4, numbers=100, alone=0.8)
HALF_ONE = Range(things=4, numbers=100, alone=0.5)  # what most of the training shows
CROWDED = Range(things=4, numbers=100, alone=0.1, reading=0.3, crowded=True)  # and its last part


def random_scene(rng: random.Random, within: Range) -> Scene:
    """Draw a scene. Half of the things that are alone are in the centre."""
    is_alone = within.alone > 0 and rng.random() < within.alone
    if rng.random() < within.reading:
        number = rng.randrange(10 if is_alone else rng.choice((10, within.numbers, within.numbers)))
        return Scene(number=str(number), colour=rng.choice(list(COLOURS)))
    count = 1 if is_alone else rng.randint(1, within.things)
    if within.crowded and not is_alone:
        count = max(count, rng.randint(1, within.things))
    places = [CENTRE] if is_alone and rng.random() < 1 / 2 else sorted(rng.sample(range(len(PLACES)), count))
    # Few colours and few shapes, so that some occur several times.
    colours = rng.sample(list(COLOURS), rng.randint(1, 4))
    shapes = rng.sample(SHAPES, rng.randint(1, 4))
    return Scene(
        things=tuple(Thing(place=place, shape=rng.choice(shapes), colour=rng.choice(colours)) for place in places)
    )


def scene(rng: random.Random, within: Range, *, held_out: bool) -> Scene:
    """Draw scenes until one is held out, or until one is not."""
    while (drawn := random_scene(rng, within)).is_held_out != held_out:
        pass
    return drawn
