"""Placeholders of images in a prompt: grown to as many tokens as the image has, and found again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The tokens of one image: `num_tokens` from position `start` on."""

    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt with a placeholder token for each merged patch."""

    token_ids: list[int]
    ranges: list[PlaceholderRange]  # by image


def expand_vision_placeholders(
    input_ids: Sequence[int], image_grid_thw: object, vision: VisionConfig, *, placeholder_id: int | None = None
) -> ExpandedPrompt:
    """Put as many placeholders between each vision start and end as the next image has merged patches.

    `image_grid_thw` [images, 3] has each image's frames, rows and columns of patches. `placeholder_id` is the token
    that stands for images, or for videos; None: for images. Placeholders that have been expanded before are accepted.

    Raises:
        InvalidParameterError: names what does not match: grids, the number of images, tokens between start and end.
    """
    placeholder = vision.image_token_id if placeholder_id is None else placeholder_id
    counts = [math.prod(grid) // vision.merge_unit for grid in checked_grids(image_grid_thw, vision)]
    token_ids: list[int] = []
    ranges: list[PlaceholderRange] = []
    position = 0
    while position < len(input_ids):
        token_id = input_ids[position]
        token_ids.append(token_id)
        position += 1
        if token_id != vision.vision_start_token_id or not _opens(input_ids, position, placeholder):
            continue
        end = _end_of(input_ids, position, placeholder, vision)
        if len(ranges) == len(counts):
            limit = f"the prompt has a placeholder for another image (token {position - 1})"
            raise InvalidParameterError("images", f"{len(counts)} images", limit)
        ranges.append(PlaceholderRange(len(token_ids), counts[len(ranges)]))
        token_ids += [placeholder] * counts[len(ranges) - 1]
        position = end
    if len(ranges) < len(counts):
        limit = f"the prompt has placeholders for {len(ranges)}"
        raise InvalidParameterError("images", f"{len(counts)} images", limit)
    _refuse_stray(token_ids, ranges, placeholder)
    return ExpandedPrompt(token_ids, ranges)


def checked_grids(image_grid_thw: object, vision: VisionConfig) -> list[tuple[int, int, int]]:
    """Return grids as tuples.

    Raises:
        InvalidParameterError: not [images, 3], or rows and columns that are not whole merged squares.
    """
    grids: NDArray[Any] = np.asarray(image_grid_thw if image_grid_thw is not None else np.zeros((0, 3), dtype=np.int64))
    if grids.ndim != 2 or grids.shape[1] != 3 or not np.issubdtype(grids.dtype, np.integer):
        what = f"{grids.dtype} {list(grids.shape)}"
        raise InvalidParameterError("image_grid_thw", what, "integers [images, 3] are expected: frames, rows, columns")
    merge = vision.spatial_merge_size
    for frames, rows, columns in grids.tolist():
        if frames < 1 or min(rows, columns) < merge or rows % merge or columns % merge:
            limit = f"at least one frame is expected, and rows and columns that are multiples of {merge}"
            raise InvalidParameterError("image_grid_thw", [frames, rows, columns], limit)
    return [(frames, rows, columns) for frames, rows, columns in grids.tolist()]


def _opens(input_ids: Sequence[int], position: int, placeholder: int) -> bool:
    """Return whether the tokens after a vision start are those of an image, or of this kind."""
    return position < len(input_ids) and input_ids[position] == placeholder


def _end_of(input_ids: Sequence[int], position: int, placeholder: int, vision: VisionConfig) -> int:
    """Return the position of the vision end after the placeholders from `position` on."""
    end = position
    while end < len(input_ids) and input_ids[end] == placeholder:
        end += 1
    if end == len(input_ids) or input_ids[end] != vision.vision_end_token_id:
        found = "the end of the prompt" if end == len(input_ids) else f"token {input_ids[end]}"
        limit = f"the vision end token ({vision.vision_end_token_id}) is missing after the placeholder at {position}"
        raise InvalidParameterError("prompt", found, limit)
    return end


def _refuse_stray(token_ids: Sequence[int], ranges: Sequence[PlaceholderRange], placeholder: int) -> None:
    expected = sum(each.num_tokens for each in ranges)
    found = token_ids.count(placeholder) if isinstance(token_ids, list) else list(token_ids).count(placeholder)
    if found != expected:
        limit = f"{found - expected} placeholders are not between a vision start and a vision end token"
        raise InvalidParameterError("prompt", f"{found} placeholders", limit)
