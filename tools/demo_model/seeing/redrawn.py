"""Scenes drawn as somebody else would: plain colours, smooth edges, centred shapes, other sizes, saved as JPEG.

Nothing of it is used in training. The pictures show how far the model's answers carry beyond `drawing.py`.
"""

import io
import math
import random

from PIL import Image, ImageDraw, ImageFont
from tools.demo_model.seeing.scenes import Scene

SIDES = (128, 224, 400, 640)  # pixels
JPEG_QUALITY = 85
_OVER = 4  # drawn so many times as large, then reduced
_COLOURS = {
    "red": "red",
    "green": "green",
    "blue": "blue",
    "yellow": "gold",
    "orange": "darkorange",
    "purple": "purple",
    "black": "black",
}


def redraw(scene: Scene, rng: random.Random) -> Image.Image:
    """Return a square picture of the scene on white."""
    side = rng.choice(SIDES)
    large = Image.new("RGB", (side * _OVER, side * _OVER), "white")
    pen = ImageDraw.Draw(large)
    if scene.number:
        _draw_number(pen, scene, side * _OVER)
    for thing in scene.things:
        row, column = divmod(thing.place, 3)
        cell = side * _OVER / 3
        centre = ((column + 0.5) * cell, (row + 0.5) * cell)
        _draw_shape(pen, thing.shape, centre, cell * rng.uniform(0.3, 0.4), _COLOURS[thing.colour])
    file = io.BytesIO()
    large.resize((side, side), Image.Resampling.LANCZOS).save(file, "jpeg", quality=JPEG_QUALITY)
    return Image.open(file)


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, centre: tuple[float, float], radius: float, colour: str) -> None:
    x, y = centre
    if shape == "circle":
        pen.circle(centre, radius, fill=colour)
    elif shape == "square":
        pen.rectangle((x - radius, y - radius, x + radius, y + radius), fill=colour)
    else:
        corners = 3 if shape == "triangle" else 10
        points = []
        for index in range(corners):
            turn = 2 * math.pi * index / corners
            length = radius * (0.4 if shape == "star" and index % 2 else 1.1)
            points.append((x + length * math.sin(turn), y - length * math.cos(turn)))
        pen.polygon(points, fill=colour)


def _draw_number(pen: ImageDraw.ImageDraw, scene: Scene, side: int) -> None:
    font = ImageFont.load_default(side * (0.6 if len(scene.number) == 1 else 0.5))
    pen.text((side / 2, side / 2), scene.number, font=font, fill=_COLOURS[scene.colour], anchor="mm")
