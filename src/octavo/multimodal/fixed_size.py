"""Pictures of one size, for CLIP and SigLIP: resized, and cropped if the model keeps the aspect ratio."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.multimodal.patches import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ImageProcessor,
    Normalization,
    Patches,
    check_proportions,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_UNSUPPORTED = ("do_pan_and_scan", "do_pad")  # several crops of one image; squares by margins


@dataclass(frozen=True, kw_only=True, slots=True)
class _Defaults:
    """Values of absent keys."""

    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crops: bool


_CLIP = _Defaults(resample=3, mean=CLIP_MEAN, std=CLIP_STD, crops=True)
_DEFAULTS = MappingProxyType(  # by image_processor_type
    {
        "CLIPImageProcessor": _CLIP,
        "LlavaImageProcessor": _CLIP,
        "SiglipImageProcessor": _Defaults(resample=3, mean=HALF, std=HALF, crops=False),
        "Gemma3ImageProcessor": _Defaults(resample=2, mean=HALF, std=HALF, crops=False),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSizeProcessor(ImageProcessor):
    """Makes squares of `size` pixels a side."""

    size: int
    short_side: int | None  # to which it is brought before the center is cropped; None: proportions change

    @classmethod
    def of(cls, fields: JsonFields, vision: VisionConfig) -> Self:
        """Read the settings of a checkpoint with this tower.

        Raises:
            CheckpointError: they are malformed.
            UnsupportedModelError: they do not fit the tower, or are not supported.
        """
        kind = fields.text("image_processor_type", "CLIPImageProcessor").removesuffix("Fast")
        if kind not in _DEFAULTS:
            known = ", ".join(_DEFAULTS)
            raise UnsupportedModelError(
                f"{fields.origin}: image_processor_type={kind!r} is not supported; known: {known}"
            )
        for key in _UNSUPPORTED:
            if fields.flag(key, False):
                raise UnsupportedModelError(f"{fields.origin}: {key}=True is not supported")
        defaults = _DEFAULTS[kind]
        crops = fields.flag("do_center_crop", defaults.crops)
        short_side = _short_side(fields) if crops else None
        size = _side(fields, "crop_size" if crops else "size")
        if size != vision.image_size:
            raise UnsupportedModelError(
                f"{fields.origin}: pictures of {size} pixels, the tower reads {vision.image_size}"
            )
        if short_side is not None and short_side < size:
            raise UnsupportedModelError(f"{fields.origin}: size={short_side}: smaller than crop_size ({size})")
        processor = cls(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            normalization=Normalization.read(fields, defaults.mean, defaults.std),
            resample=fields.integer("resample", defaults.resample, minimum=0),
            size=size,
            short_side=short_side,
        )
        processor.check_fits(fields, vision)
        return processor

    def resized(self, picture: "Image", name: str, num_frames: int) -> NDArray[np.uint8]:
        """See `ImageProcessor.resized`."""
        if self.short_side is None:
            return np.asarray(picture.resize((self.size, self.size), resample=self.resample))
        check_proportions(picture, name)
        short, long = min(picture.size), max(picture.size)
        width, height = (
            self.short_side if side == short else int(self.short_side * long / short) for side in picture.size
        )
        resized = np.asarray(picture.resize((width, height), resample=self.resample))
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return resized[top : top + self.size, left : left + self.size]

    def patches_of(self, made: Mapping[str, Any]) -> list[Patches]:
        """See `ImageProcessor.patches_of`."""
        values = np.asarray(made.get("pixel_values", np.zeros((0, 3, self.size, self.size))), dtype=np.float32)
        channels = len(self.normalization.mean)
        if values.ndim != 4 or values.shape[1:] != (channels, self.size, self.size):
            wanted = f"[images, {channels}, {self.size}, {self.size}] is expected"
            raise InvalidParameterError("pixel_values", list(values.shape), wanted)
        return [Patches(*self.cut(image.transpose(1, 2, 0)[None])) for image in values]


def _short_side(fields: JsonFields) -> int:
    """Return the size of the shorter side after resizing: a number, or an object that says so."""
    if isinstance(fields.values.get("size"), dict):
        return fields.nested("size").integer("shortest_edge")
    return fields.integer("size", 224)


def _side(fields: JsonFields, key: str) -> int:
    """Return the side of a square: a number, or an object with both sides."""
    if not isinstance(fields.values.get(key), dict):
        return fields.integer(key, 224)
    sides = fields.nested(key)
    if sides.integer("height") != sides.integer("width"):
        raise UnsupportedModelError(f"{fields.origin}: {key}={fields.values[key]!r} is not supported: not a square")
    return sides.integer("height")
