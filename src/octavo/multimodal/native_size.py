"""Pictures at nearly their original size and aspect ratio, for Qwen2-VL and its successors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.patches import CLIP_MEAN, CLIP_STD, ImageProcessor, Normalization, Patches, check_proportions
from octavo.multimodal.placeholders import checked_grids

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSizeProcessor(ImageProcessor):
    """Keeps the number of pixels within limits."""

    min_pixels: int
    max_pixels: int
    vision: VisionConfig
    limits_whole_video: bool = False  # the limits are those of all frames together (Qwen3-VL); else of each

    @classmethod
    def of(cls, fields: JsonFields, vision: VisionConfig) -> Self:
        """Read the settings of a checkpoint with this tower.

        Raises:
            CheckpointError: they are malformed.
            UnsupportedModelError: they do not fit the tower, or switch a step off.
        """
        size = fields.nested("size")
        processor = cls(
            patch_size=fields.integer("patch_size", vision.patch_size),
            temporal_patch_size=fields.integer("temporal_patch_size", vision.temporal_patch_size),
            merge_size=fields.integer("merge_size", vision.spatial_merge_size),
            min_pixels=fields.integer("min_pixels", size.integer("shortest_edge", 56 * 56)),
            max_pixels=fields.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280)),
            normalization=Normalization.read(fields, CLIP_MEAN, CLIP_STD),
            resample=fields.integer("resample", 3, minimum=0),
            vision=vision,
        )
        processor.check_fits(fields, vision)
        return processor

    def resized(self, picture: "Image", name: str, num_frames: int) -> NDArray[np.uint8]:
        """See `ImageProcessor.resized`."""
        check_proportions(picture, name)
        size = self.target_size(*picture.size, num_frames if self.limits_whole_video else 1)
        return np.asarray(picture.resize(size, resample=self.resample))

    def target_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        """Return the nearest width and height in whole merged squares whose number of pixels is within the limits."""
        unit = self.patch_size * self.merge_size
        if self.limits_whole_video and min(width, height) < unit:
            scale = unit / min(width, height)
            width, height = int(width * scale), int(height * scale)
        new_height, new_width = (round(side / unit) * unit for side in (height, width))
        group = self.temporal_patch_size if self.limits_whole_video else 1
        num_frames = max(
            num_frames, group
        )  # a lone frame is repeated; as none at all, it would shrink to the least size
        num_pixels = round(num_frames / group) * group * new_height * new_width
        if num_pixels > self.max_pixels:
            factor = math.sqrt((num_frames * height * width) / self.max_pixels)
            new_height, new_width = (max(unit, math.floor(side / factor / unit) * unit) for side in (height, width))
        elif num_pixels < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (num_frames * height * width))
            new_height, new_width = (math.ceil(side * factor / unit) * unit for side in (height, width))
        return new_width, new_height

    def patches_of(self, made: Mapping[str, Any]) -> list[Patches]:
        """See `ImageProcessor.patches_of`."""
        grids = checked_grids(made.get("image_grid_thw"), self.vision)
        if not grids:
            return []
        ends = np.cumsum([math.prod(grid) for grid in grids])
        values = np.asarray(made["pixel_values"], dtype=np.float32)
        wanted = (int(ends[-1]), self.vision.patch_values)
        if values.shape != wanted:
            raise InvalidParameterError("pixel_values", list(values.shape), f"{list(wanted)} by image_grid_thw")
        return [Patches(part, grid) for part, grid in zip(np.split(values, ends[:-1]), grids, strict=True)]
