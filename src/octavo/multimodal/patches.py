"""From a picture to the patches that a vision tower reads: resized and cut; what each byte is normalized to.

Bytes travel, a quarter of the numbers that they stand for. Those are the same as the image processors of Qwen2-VL and
its successors on top of Pillow compute, bit for bit.

Legend: C = channels, F = frames of a patch, S = side of a patch in pixels, M = side of a merged square in patches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_RATIO = 200  # of the sides
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_SWITCHES = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True, slots=True)
class Patches:
    """An image or video as its tower reads it."""

    values: NDArray[Any]  # [patches, C * F * S * S] uint8, or float32 without levels
    grid: tuple[int, int, int]  # (pairs of) frames, rows and columns of patches
    interval: float = 1.0  # rotary positions between frames
    levels: NDArray[np.float32] | None = None  # [C, 256] what each byte of a channel is normalized to


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessor:
    """The settings in `preprocessor_config.json`."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int  # a filter of Pillow

    @classmethod
    def read(cls, folder: Path, vision: VisionConfig) -> Self:
        """Read the settings of the checkpoint in `folder`.

        Raises:
            CheckpointError: there are none, or they are malformed.
            UnsupportedModelError: they do not fit the tower, or switch a step off.
        """
        return cls._of(_fields_in(folder), vision)

    @classmethod
    def read_for_videos(cls, folder: Path, vision: VisionConfig) -> Self:
        """Do the same for the frames of videos; without settings of their own, those of images apply."""
        own = folder / "video_preprocessor_config.json"
        return cls._of(JsonFields.read(own), vision) if own.exists() else cls.read(folder, vision)

    @classmethod
    def _of(cls, fields: JsonFields, vision: VisionConfig) -> Self:
        for key in _SWITCHES:
            if not fields.flag(key, True):
                raise UnsupportedModelError(f"{fields.origin}: {key}=False is not supported")
        size = fields.nested("size")
        processor = cls(
            patch_size=fields.integer("patch_size", vision.patch_size),
            temporal_patch_size=fields.integer("temporal_patch_size", vision.temporal_patch_size),
            merge_size=fields.integer("merge_size", vision.spatial_merge_size),
            min_pixels=fields.integer("min_pixels", size.integer("shortest_edge", 56 * 56)),
            max_pixels=fields.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280)),
            mean=_numbers(fields, "image_mean", _CLIP_MEAN),
            std=_numbers(fields, "image_std", _CLIP_STD),
            rescale_factor=fields.number("rescale_factor", 1 / 255),
            resample=fields.integer("resample", 3, minimum=0),
        )
        found = (processor.patch_size, processor.temporal_patch_size, processor.merge_size, len(processor.mean))
        wanted = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size, vision.in_channels)
        if found != wanted:
            raise UnsupportedModelError(
                f"{fields.origin}: patches of {found} (patch_size, temporal_patch_size, merge_size, channels), "
                f"but the vision tower reads {wanted}"
            )
        return processor

    def process(self, frames: Sequence["Image"], name: str) -> Patches:
        """Cut an RGB picture, or the frames of a video, which have one size, into patches.

        Raises:
            InvalidParameterError: one side is more than 200 times the other.
        """
        width, height = self.target_size(*frames[0].size, name)
        arrays = [np.asarray(frame.resize((width, height), resample=self.resample)) for frame in frames]
        arrays += [arrays[-1]] * (-len(arrays) % self.temporal_patch_size)  # the last frame is repeated
        return self._cut(np.stack(arrays))

    def target_size(self, width: int, height: int, name: str) -> tuple[int, int]:
        """Return the nearest width and height in whole merged squares, with a number of pixels within the limits.

        Raises:
            InvalidParameterError: one side is more than 200 times the other.
        """
        if max(width, height) / min(width, height) > _MAX_RATIO:
            limit = f"one side may be at most {_MAX_RATIO} times the other"
            raise InvalidParameterError(name, f"{width} x {height} pixels", limit)
        unit = self.patch_size * self.merge_size
        new_height, new_width = (round(side / unit) * unit for side in (height, width))
        if new_height * new_width > self.max_pixels:
            factor = math.sqrt((height * width) / self.max_pixels)
            new_height, new_width = (max(unit, math.floor(side / factor / unit) * unit) for side in (height, width))
        elif new_height * new_width < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            new_height, new_width = (math.ceil(side * factor / unit) * unit for side in (height, width))
        return new_width, new_height

    def _levels(self) -> NDArray[np.float32]:
        """Return what each of the 256 levels of each channel is normalized to: [C, 256]."""
        rescaled = (np.arange(256).astype(np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        levels: NDArray[np.float32] = (rescaled - mean) / std
        return levels

    def _cut(self, frames: NDArray[np.uint8]) -> Patches:
        """Cut frames [frames, height, width, C]; the squares that are merged into a token are neighbors."""
        num_frames, height, width, channels = frames.shape
        frame, side, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        grid = (num_frames // frame, height // side, width // side)
        squares = (grid[0], frame, grid[1] // merge, merge, side, grid[2] // merge, merge, side, channels)
        ordered = frames.reshape(squares).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        values = ordered.reshape(math.prod(grid), channels * frame * side * side)
        return Patches(values, grid, levels=self._levels())


def _fields_in(folder: Path) -> JsonFields:
    """Return the settings from either of the files that have them."""
    own, combined = folder / "preprocessor_config.json", folder / "processor_config.json"
    if not own.exists() and combined.exists():
        return JsonFields.read(combined).nested("image_processor")
    return JsonFields.read(own)


def _numbers(fields: JsonFields, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = fields.values.get(key, default)
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, int | float) for value in values):
        raise fields.fail(key, "a list of numbers is expected")
    return tuple(float(value) for value in values)
