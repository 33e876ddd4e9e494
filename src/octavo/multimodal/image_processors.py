"""How a checkpoint wants its pictures: of one size (CLIP and SigLIP), or nearly of their own (Qwen2-VL and later).

Pictures are cut into the patches that a vision tower reads, and sent as bytes, a quarter of the size of their
normalized values. These equal the results of transformers' image processors on Pillow, bit for bit.

Legend: C = channels, F = frames of a patch, S = side of a patch in pixels, M = side of a merged square in patches.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.json_fields import JsonFields
from octavo.config.model import VisionConfig
from octavo.errors import InvalidParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from PIL.Image import Image


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
_MAX_TOKENS = 1 << 22  # of an image: more than any context; placeholders are made before they meet that limit
_MAX_RATIO = 200  # of a picture's sides
_UNSUPPORTED = ("do_pan_and_scan", "do_pad")  # several crops of one image; squares by margins
_DEFAULTS = MappingProxyType(  # by image_processor_type: resample, mean, std, and whether pictures are cropped
    {
        "CLIPImageProcessor": (3, CLIP_MEAN, CLIP_STD, True),
        "LlavaImageProcessor": (3, CLIP_MEAN, CLIP_STD, True),
        "SiglipImageProcessor": (3, HALF, HALF, False),
        "Gemma3ImageProcessor": (2, HALF, HALF, False),
    }
)


Numbers = Sequence[float]  # one for each channel
Grid = tuple[int, int, int]  # (pairs of) frames, rows and columns of patches


@dataclass(frozen=True)
class Patches:
    """An image or video as its tower reads it."""

    values: NDArray[Any]  # [patches, C * F * S * S] uint8, or float32 without levels
    grid: Grid
    interval: float = 1.0  # rotary positions between frames
    levels: NDArray[np.float32] | None = None  # [C, 256] what each byte of a channel is normalized to

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over grid, interval, levels and patches: of the content, whatever its name or address."""
        digest = hashlib.sha256(np.array(self.grid, dtype="<i8").tobytes())
        digest.update(np.array(self.interval, dtype="<f8").tobytes())
        if self.levels is not None:
            digest.update(np.ascontiguousarray(self.levels, dtype="<f4").data)
        digest.update(np.ascontiguousarray(self.values).data)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessor(ABC):
    """The settings in `preprocessor_config.json`; subclasses differ in how pictures are resized."""

    vision: VisionConfig
    levels: NDArray[np.float32]  # see `Patches`
    resample: int  # a filter of Pillow

    def process(self, frames: Sequence["Image"], name: str) -> Patches:
        """Cut an RGB picture, or the frames of a video, which have one size, into patches."""
        return self.patches([self.resized(frame, name, len(frames)) for frame in frames])

    def patches(self, frames: Sequence[NDArray[np.uint8]]) -> Patches:
        """Cut frames [height, width, C] of the tower's size into patches; the last one fills its group."""
        missing = -len(frames) % self.vision.temporal_patch_size
        values, grid = self.cut(np.stack([*frames, *[frames[-1]] * missing]))
        return Patches(values, grid, levels=self.levels)

    @abstractmethod
    def resized(self, picture: "Image", name: str, num_frames: int) -> NDArray[np.uint8]:
        """Return a picture, one of `num_frames`, at the tower's size: [height, width, C]. Raises as `process`."""

    @abstractmethod
    def patches_of(self, made: Mapping[str, Any]) -> list[Patches]:
        """Return the images in what a processor of transformers' kind made."""

    def cut(self, frames: NDArray[Any]) -> tuple[NDArray[Any], Grid]:
        """Cut frames [frames, height, width, C] into patches [., C * F * S * S]; return these and their grid.

        The patches that are merged into a token are adjacent. Incomplete patches at the right and bottom are dropped.
        """
        num_frames, height, width, channels = frames.shape
        frame, side, merge = self.vision.temporal_patch_size, self.vision.patch_size, self.vision.spatial_merge_size
        grid = (num_frames // frame, height // side, width // side)
        frames = frames[:, : grid[1] * side, : grid[2] * side]
        squares = (grid[0], frame, grid[1] // merge, merge, side, grid[2] // merge, merge, side, channels)
        ordered = frames.reshape(squares).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return ordered.reshape(math.prod(grid), channels * frame * side * side), grid


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSizeProcessor(ImageProcessor):
    """Makes squares of `size` pixels a side."""

    size: int
    short_side: int | None  # to which it is brought before the center is cropped; None: proportions change

    @classmethod
    def of(cls, fields: JsonFields, vision: VisionConfig) -> Self:
        kind = fields.text("image_processor_type", "CLIPImageProcessor").removesuffix("Fast")
        if kind not in _DEFAULTS:
            raise fields.unsupported("image_processor_type", f"; known: {', '.join(_DEFAULTS)}")
        for key in _UNSUPPORTED:
            if fields.flag(key, False):
                raise fields.unsupported(key)
        resample, mean, std, crops = _DEFAULTS[kind]
        crops = fields.flag("do_center_crop", crops)
        short_side = None
        if crops:  # a number, or an object that says so
            is_object = isinstance(fields.values.get("size"), dict)
            short_side = fields.nested("size").integer("shortest_edge") if is_object else fields.integer("size", 224)
        size_key = "crop_size" if crops else "size"  # a number, or an object with both sides
        sides = fields.nested(size_key) if isinstance(fields.values.get(size_key), dict) else None
        if sides is not None and sides.integer("height") != sides.integer("width"):
            raise fields.unsupported(size_key, ": not a square")
        size = fields.integer(size_key, 224) if sides is None else sides.integer("height")
        if size != vision.image_size:
            found = f"pictures of {size} pixels, the tower reads {vision.image_size}"
            raise UnsupportedModelError(f"{fields.origin}: {found}")
        if short_side is not None and short_side < size:
            raise UnsupportedModelError(f"{fields.origin}: size={short_side}: smaller than crop_size ({size})")
        levels, resample = _levels(fields, vision, mean, std), fields.integer("resample", resample, minimum=0)
        return cls(vision=vision, levels=levels, resample=resample, size=size, short_side=short_side)

    def resized(self, picture: "Image", name: str, num_frames: int) -> NDArray[np.uint8]:
        if self.short_side is None:
            return np.asarray(picture.resize((self.size, self.size), resample=self.resample))
        _check_proportions(picture, name)
        short, long = min(picture.size), max(picture.size)
        width, height = (
            self.short_side if side == short else int(self.short_side * long / short) for side in picture.size
        )
        resized = np.asarray(picture.resize((width, height), resample=self.resample))
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return resized[top : top + self.size, left : left + self.size]

    def patches_of(self, made: Mapping[str, Any]) -> list[Patches]:
        values = np.asarray(made.get("pixel_values", np.zeros((0, 3, self.size, self.size))), dtype=np.float32)
        channels = self.vision.in_channels
        if values.ndim != 4 or values.shape[1:] != (channels, self.size, self.size):
            wanted = f"[images, {channels}, {self.size}, {self.size}] is expected"
            raise InvalidParameterError("pixel_values", list(values.shape), wanted)
        return [Patches(*self.cut(image.transpose(1, 2, 0)[None])) for image in values]


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSizeProcessor(ImageProcessor):
    """Keeps the number of pixels within limits."""

    min_pixels: int
    max_pixels: int
    limits_whole_video: bool = False  # the limits are those of all frames together (Qwen3-VL); else of each

    @classmethod
    def of(cls, fields: JsonFields, vision: VisionConfig) -> Self:
        wanted = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
        }
        found = {key: fields.integer(key, value) for key, value in wanted.items()}
        if found != wanted:
            raise UnsupportedModelError(f"{fields.origin}: patches of {found}, but the vision tower reads {wanted}")
        size = fields.nested("size")
        return cls(
            vision=vision,
            levels=_levels(fields, vision, CLIP_MEAN, CLIP_STD),
            resample=fields.integer("resample", 3, minimum=0),
            min_pixels=fields.integer("min_pixels", size.integer("shortest_edge", 56 * 56)),
            max_pixels=fields.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280)),
        )

    def resized(self, picture: "Image", name: str, num_frames: int) -> NDArray[np.uint8]:
        _check_proportions(picture, name)
        size = self.target_size(*picture.size, num_frames if self.limits_whole_video else 1)
        return np.asarray(picture.resize(size, resample=self.resample))

    def target_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        """Return the nearest width and height in whole merged squares whose number of pixels is within the limits."""
        unit = self.vision.patch_size * self.vision.spatial_merge_size
        if self.limits_whole_video and min(width, height) < unit:
            scale = unit / min(width, height)
            width, height = int(width * scale), int(height * scale)
        new_height, new_width = (round(side / unit) * unit for side in (height, width))
        group = self.vision.temporal_patch_size if self.limits_whole_video else 1
        num_frames = max(num_frames, group)  # a lone one is repeated; as none at all, it would shrink to the least size
        num_pixels = round(num_frames / group) * group * new_height * new_width
        if num_pixels > self.max_pixels:
            factor = math.sqrt((num_frames * height * width) / self.max_pixels)
            new_height, new_width = (max(unit, math.floor(side / factor / unit) * unit) for side in (height, width))
        elif num_pixels < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (num_frames * height * width))
            new_height, new_width = (math.ceil(side * factor / unit) * unit for side in (height, width))
        return new_width, new_height

    def patches_of(self, made: Mapping[str, Any]) -> list[Patches]:
        grids = checked_grids(made.get("image_grid_thw"), self.vision)
        if not grids:
            return []
        ends = np.cumsum([math.prod(grid) for grid in grids])
        values = np.asarray(made["pixel_values"], dtype=np.float32)
        wanted = (int(ends[-1]), self.vision.patch_values)
        if values.shape != wanted:
            raise InvalidParameterError("pixel_values", list(values.shape), f"{list(wanted)} by image_grid_thw")
        return [Patches(part, grid) for part, grid in zip(np.split(values, ends[:-1]), grids, strict=True)]


def read_video_fields(folder: Path) -> JsonFields:
    """Return the settings for videos of the checkpoint in `folder`; without any, those of images apply."""
    combined, own = _combined(folder), folder / "video_preprocessor_config.json"
    if "video_processor" in combined:
        return combined.nested("video_processor")
    return JsonFields.read(own) if own.exists() else read_image_fields(folder)


def frame_processor(fields: JsonFields, vision: VisionConfig) -> ImageProcessor:
    """Return the processor of the frames of videos."""
    if "size" not in fields and vision.image_size is None:  # the default of images is another
        unit = 32 if vision.has_frame_times else 28  # pixels of a token's side, whatever the checkpoint's are
        least, most = 128 * unit**2, 768 * unit**2
        fields = JsonFields(fields.origin, {**fields.values, "size": {"shortest_edge": least, "longest_edge": most}})
    processor = image_processor(fields, vision)
    if vision.has_frame_times and isinstance(processor, NativeSizeProcessor):
        return replace(processor, limits_whole_video=True)
    return processor


def image_processor(fields: JsonFields, vision: VisionConfig) -> ImageProcessor:
    return (NativeSizeProcessor if vision.image_size is None else FixedSizeProcessor).of(fields, vision)


def _levels(
    fields: JsonFields, vision: VisionConfig, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.float32]:
    """Return `Patches.levels` by `image_mean`, `image_std` and `rescale_factor`; absent: `mean`, `std` and 1/255."""
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(key, True):
            raise fields.unsupported(key)
    means, stds = _numbers(fields, "image_mean", mean), _numbers(fields, "image_std", std)
    if len(means) != vision.in_channels:
        channels = f"pictures of {len(means)} channels, but the vision tower reads {vision.in_channels}"
        raise UnsupportedModelError(f"{fields.origin}: {channels}")
    factor = fields.number("rescale_factor", 1 / 255)
    rescaled = (np.arange(256).astype(np.float64) * factor).astype(np.float32)
    levels: NDArray[np.float32] = (rescaled - means) / stds
    return levels


def _numbers(fields: JsonFields, key: str, default: Numbers) -> NDArray[np.float32]:
    """Return a number for each channel: [C, 1]."""
    values = fields.values.get(key, default)
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, int | float) for value in values):
        raise fields.fail(key, "a list of numbers is expected")
    return np.array(values, dtype=np.float32)[:, None]


def _check_proportions(picture: "Image", name: str) -> None:
    """Check the aspect ratio of a picture. Raises InvalidParameterError: one side is more than 200 times the other."""
    if max(picture.size) / min(picture.size) > _MAX_RATIO:
        limit = f"one side may be at most {_MAX_RATIO} times the other"
        raise InvalidParameterError(name, f"{picture.width} x {picture.height} pixels", limit)


def read_image_fields(folder: Path) -> JsonFields:
    """Return the settings for pictures of the checkpoint in `folder`."""
    combined = _combined(folder)
    if "image_processor" in combined:
        return combined.nested("image_processor")
    return JsonFields.read(folder / "preprocessor_config.json")


def _combined(folder: Path) -> JsonFields:
    """Return `processor_config.json`, empty if there is none. Since version 5, transformers saves all settings there.

    Where a checkpoint has older files, too, those of the newer one count. Written by version 4, it has none.
    """
    path = folder / "processor_config.json"
    return JsonFields.read(path) if path.exists() else JsonFields(str(path), {})


def checked_grids(grid_thw: object, vision: VisionConfig) -> list[Grid]:
    """Return grids as tuples; None is no grid."""
    try:
        grids: NDArray[Any] = np.zeros((0, 3), dtype=np.int64) if grid_thw is None else np.asarray(grid_thw)
    except ValueError:  # lists of different lengths
        grids = np.empty(0, dtype=object)
    if grids.ndim != 2 or grids.shape[1] != 3 or not np.issubdtype(grids.dtype, np.integer):
        what = f"{grids.dtype} {list(grids.shape)}"
        raise InvalidParameterError("image_grid_thw", what, "integers [images, 3] are expected: frames, rows, columns")
    merge = vision.spatial_merge_size
    found: list[Grid] = [(frames, rows, columns) for frames, rows, columns in grids.tolist()]
    for grid in found:
        if grid[0] < 1 or any(side < merge or side % merge for side in grid[1:]):
            limit = f"at least one frame is expected, and rows and columns that are multiples of {merge}"
        elif (num_tokens := vision.num_tokens(grid)) > _MAX_TOKENS:
            limit = f"{num_tokens} tokens, at most {_MAX_TOKENS} are expected"
        elif vision.fixed_grid not in (None, grid):
            limit = f"{list(vision.fixed_grid)} is expected: all images of this model have one size"
        else:
            continue
        raise InvalidParameterError("image_grid_thw", list(grid), limit)
    return found
