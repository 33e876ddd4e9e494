"""Draws a scene with Pillow: filled shapes or a number on a light ground, with random sizes, offsets and tints."""

import functools
import io
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont
from tools.demo_model.seeing.scenes import CENTRE, COLOURS, Scene

Size = tuple[int, int]
Colour = tuple[int, ...]
SIDE = (110, 330)  # pixels
TINT = 20  # how far a level may be from its colour's
JPEG_SHARE, JPEG_QUALITY = 0.3, (60, 95)
LARGE_SHARE = 0.75  # of pictures with one shape, in the centre: any size


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where something was drawn: its centre as fractions of width and height."""

    x: float
    y: float
    kind: str  # a shape, or a digit
    colour: str


def random_size(rng: random.Random) -> Size:
    """Return the size of a picture; its sides differ by less than a third."""
    width, ratio = rng.randint(*SIDE), rng.uniform(1.0, 1.3)
    return width, round(width * rng.choice((ratio, 1 / ratio)))


def draw(scene: Scene, size: Size, rng: random.Random) -> tuple[Image.Image, list[Mark]]:
    """Return a picture of the scene and what is where."""
    shade = rng.randint(225, 255)
    picture = Image.new("RGB", size, tuple(min(255, shade + rng.randint(-6, 6)) for _ in range(3)))
    pen = ImageDraw.Draw(picture)
    marks = _draw_number(pen, scene, size, rng) if scene.number else _draw_things(pen, scene, size, rng)
    return (_as_jpeg(picture, rng) if rng.random() < JPEG_SHARE else picture), marks


def _as_jpeg(picture: Image.Image, rng: random.Random) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=rng.randint(*JPEG_QUALITY))
    return Image.open(file).convert("RGB")


def _tinted(colour: str, rng: random.Random) -> Colour:
    return tuple(max(0, min(255, level + rng.randint(-TINT, TINT))) for level in COLOURS[colour])


def _draw_things(pen: ImageDraw.ImageDraw, scene: Scene, size: Size, rng: random.Random) -> list[Mark]:
    """Draw each thing in its third of width and height, up to a twelfth of it off the middle.

    One that is alone in the centre may fill most of the picture.
    """
    cell_width, cell_height = size[0] / 3, size[1] / 3
    marks = []
    for thing in scene.things:
        row, column = divmod(thing.place, 3)
        x = (column + 0.5 + rng.uniform(-1, 1) / 12) * cell_width
        y = (row + 0.5 + rng.uniform(-1, 1) / 12) * cell_height
        radius = min(cell_width, cell_height) * rng.uniform(0.28, 0.42)
        if len(scene.things) == 1 and thing.place == CENTRE and rng.random() < LARGE_SHARE:
            radius = min(size) * rng.uniform(0.12, 0.42)
        _draw_shape(pen, thing.shape, (x, y), radius, _tinted(thing.colour, rng))
        marks.append(Mark(x=x / size[0], y=y / size[1], kind=thing.shape, colour=thing.colour))
    return marks


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, centre: tuple[float, float], radius: float, colour: Colour
) -> None:
    x, y = centre
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "square":
        half = 0.86 * radius
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif shape == "triangle":
        pen.polygon(_corners(centre, [1.1 * radius] * 3), fill=colour)
    else:
        pen.polygon(_corners(centre, [1.15 * radius, 0.46 * radius] * 5), fill=colour)


def _corners(centre: tuple[float, float], radii: list[float]) -> list[tuple[float, float]]:
    """Return points around the centre, the first one above it."""
    turns = (2 * math.pi * index / len(radii) for index in range(len(radii)))
    return [
        (centre[0] + radius * math.sin(turn), centre[1] - radius * math.cos(turn))
        for turn, radius in zip(turns, radii, strict=True)
    ]


@functools.cache
def _font() -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(100)
    assert isinstance(font, ImageFont.FreeTypeFont)  # where Pillow has FreeType, as its wheels do
    return font


def _draw_number(pen: ImageDraw.ImageDraw, scene: Scene, size: Size, rng: random.Random) -> list[Mark]:
    """Draw the number in the middle, up to a twentieth off it, filling most of the picture or half of it."""
    width, height = size
    font = _font()
    left, top, right, bottom = font.getbbox(scene.number)
    scale = rng.uniform(0.5, 1.0) * min(0.8 * width / (right - left), 0.65 * height / (bottom - top))
    font = font.font_variant(size=100 * scale)
    left, top, right, bottom = font.getbbox(scene.number)
    x = (0.5 + rng.uniform(-0.05, 0.05)) * width - (left + right) / 2
    y = (0.5 + rng.uniform(-0.05, 0.05)) * height - (top + bottom) / 2
    colour = _tinted(scene.colour, rng)
    pen.text((x, y), scene.number, font=font, fill=colour, stroke_width=rng.uniform(0, 4) * scale, stroke_fill=colour)
    middle = (y + (top + bottom) / 2) / height
    ends = [x + font.getlength(scene.number[:count]) for count in range(len(scene.number) + 1)]
    return [
        Mark(x=(ends[at] + ends[at + 1]) / 2 / width, y=middle, kind=digit, colour=scene.colour)
        for at, digit in enumerate(scene.number)
    ]
