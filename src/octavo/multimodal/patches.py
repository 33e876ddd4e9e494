"""Cuts pictures into the patches that a tower reads, and gives the normalized value of each byte.

Patches are sent as bytes, a quarter of the size of their normalized values. These equal the results of transformers'
image processors on Pillow, bit for bit.

Legend: C = channels, F = frames of a patch, S = side of a patch in pixels, M = side of a merged square in patches.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.json_fields import JsonFields
from octavo.errors import InvalidParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
_MAX_RATIO = 200  # of the sides


@dataclass(frozen=True, slots=True)
class Patches:
    """An image or video as its tower reads it."""

    values: NDArray[Any]  # [patches, C * F * S * S] uint8, or float32 without levels
    grid: tuple[int, int, int]  # (groups of) frames, rows and columns of patches
    interval: float = 1.0  # rotary positions between frames
    levels: NDArray[np.float32] | None = None  # [C, 256] what each byte of a channel is normalized to


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalization:
    """The normalization of a picture's bytes."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float

    @classmethod
    def read(cls, fields: JsonFields, mean: tuple[float, ...], std: tuple[float, ...]) -> "Normalization":
        """Read `image_mean`, `image_std` and `rescale_factor`; absent ones are `mean`, `std` and 1/255."""
        for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not fields.flag(key, True):
                raise UnsupportedModelError(f"{fields.origin}: {key}=False is not supported")
        mean, std = _numbers(fields, "image_mean", mean), _numbers(fields, "image_std", std)
        return cls(mean=mean, std=std, rescale_factor=fields.number("rescale_factor", 1 / 255))

    def levels(self) -> NDArray[np.float32]:
        """Return what each of the 256 levels of each channel is normalized to: [C, 256]."""
        rescaled = (np.arange(256).astype(np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        levels: NDArray[np.float32] = (rescaled - mean) / std
        return levels


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessor(ABC):
    """The settings in `preprocessor_config.json`; subclasses differ in how pictures are resized."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    normalization: Normalization
    resample: int  # a filter of Pillow

    def process(self, frames: Sequence["Image"], name: str) -> Patches:
        """Cut an RGB picture, or the frames of a video, which have one size, into patches."""
        return self.patches([self.resized(frame, name, len(frames)) for frame in frames])

    def patches(self, frames: Sequence[NDArray[np.uint8]]) -> Patches:
        """Cut frames [height, width, C] of the tower's size into patches; the last one fills its group."""
        missing = -len(frames) % self.temporal_patch_size
        values, grid = self.cut(np.stack([*frames, *[frames[-1]] * missing]))
        return Patches(values, grid, levels=self.normalization.levels())

    @abstractmethod
    def resized(self, picture: "Image", name: str, num_frames: int) -> NDArray[np.uint8]:
        """Return a picture, one of `num_frames`, at the tower's size: [height, width, C]. Raises as `process`."""

    @abstractmethod
    def patches_of(self, made: Mapping[str, Any]) -> list[Patches]:
        """Return the images in what a processor of transformers' kind made."""

    def cut(self, frames: NDArray[Any]) -> tuple[NDArray[Any], tuple[int, int, int]]:
        """Cut frames [frames, height, width, C] into patches [., C * F * S * S]; return these and their grid.

        The patches that are merged into a token are adjacent. Incomplete patches at the right and bottom are dropped.
        """
        num_frames, height, width, channels = frames.shape
        frame, side, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        grid = (num_frames // frame, height // side, width // side)
        frames = frames[:, : grid[1] * side, : grid[2] * side]
        squares = (grid[0], frame, grid[1] // merge, merge, side, grid[2] // merge, merge, side, channels)
        ordered = frames.reshape(squares).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return ordered.reshape(math.prod(grid), channels * frame * side * side), grid


def check_proportions(picture: "Image", name: str) -> None:
    """Check the aspect ratio of a picture. Raises InvalidParameterError: one side is more than 200 times the other."""
    if max(picture.size) / min(picture.size) > _MAX_RATIO:
        limit = f"one side may be at most {_MAX_RATIO} times the other"
        raise InvalidParameterError(name, f"{picture.width} x {picture.height} pixels", limit)


def _numbers(fields: JsonFields, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = fields.values.get(key, default)
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, int | float) for value in values):
        raise fields.fail(key, "a list of numbers is expected")
    return tuple(float(value) for value in values)
