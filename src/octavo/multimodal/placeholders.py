"""Placeholders of images and videos in a prompt: grown to as many tokens as each has, and found again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError

Grid = tuple[int, int, int]  # (pairs of) frames, rows and columns of patches


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The tokens of one image or video: `num_tokens` from position `start` on."""

    start: int
    num_tokens: int
    is_video: bool = False


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt with a placeholder token for each merged patch."""

    token_ids: list[int]
    ranges: list[PlaceholderRange]  # in the order of the prompt


def expand_vision_placeholders(
    input_ids: Sequence[int], image_grid_thw: object, vision: VisionConfig, video_grid_thw: object = None
) -> ExpandedPrompt:
    """Put as many placeholders between each vision start and end as the next image, or video, has merged patches.

    Grids [images, 3] have each one's frames, rows and columns of patches. Placeholders that have been expanded before
    are accepted.

    Raises:
        InvalidParameterError: names what does not match: grids, numbers of images, tokens between start and end.
    """
    token_ids: list[int] = []
    ranges: list[PlaceholderRange] = []
    counts = {
        placeholder: [math.prod(grid) // vision.merge_unit for grid in checked_grids(grids, vision)]
        for placeholder, grids in ((vision.image_token_id, image_grid_thw), (vision.video_token_id, video_grid_thw))
    }
    num_used = dict.fromkeys(counts, 0)
    position = 0
    while position < len(input_ids):
        token_id = input_ids[position]
        token_ids.append(token_id)
        position += 1
        if token_id != vision.vision_start_token_id or position == len(input_ids) or input_ids[position] not in counts:
            continue
        placeholder = input_ids[position]
        end = _end_of(input_ids, position, vision)
        of_kind, is_video = counts[placeholder], placeholder == vision.video_token_id
        if num_used[placeholder] == len(of_kind):
            limit = f"the prompt has a placeholder for another one (token {position - 1})"
            raise InvalidParameterError(_names(is_video), f"{len(of_kind)} {_names(is_video)}", limit)
        count = of_kind[num_used[placeholder]]
        num_used[placeholder] += 1
        ranges.append(PlaceholderRange(len(token_ids), count, is_video))
        token_ids += [placeholder] * count
        position = end
    _check_used(token_ids, counts, num_used, vision)
    return ExpandedPrompt(token_ids, ranges)


def checked_grids(grid_thw: object, vision: VisionConfig) -> list[Grid]:
    """Return grids as tuples; None is no grid.

    Raises:
        InvalidParameterError: not [images, 3], or rows and columns that are not whole merged squares.
    """
    grids: NDArray[Any] = np.zeros((0, 3), dtype=np.int64) if grid_thw is None else np.asarray(grid_thw)
    if grids.ndim != 2 or grids.shape[1] != 3 or not np.issubdtype(grids.dtype, np.integer):
        what = f"{grids.dtype} {list(grids.shape)}"
        raise InvalidParameterError("image_grid_thw", what, "integers [images, 3] are expected: frames, rows, columns")
    merge = vision.spatial_merge_size
    for frames, rows, columns in grids.tolist():
        if frames < 1 or min(rows, columns) < merge or rows % merge or columns % merge:
            limit = f"at least one frame is expected, and rows and columns that are multiples of {merge}"
            raise InvalidParameterError("image_grid_thw", [frames, rows, columns], limit)
    return [(frames, rows, columns) for frames, rows, columns in grids.tolist()]


def _end_of(input_ids: Sequence[int], position: int, vision: VisionConfig) -> int:
    """Return the position of the vision end after the placeholders from `position` on."""
    end = position
    while end < len(input_ids) and input_ids[end] == input_ids[position]:
        end += 1
    if end == len(input_ids) or input_ids[end] != vision.vision_end_token_id:
        found = "the end of the prompt" if end == len(input_ids) else f"token {input_ids[end]}"
        limit = f"the vision end token ({vision.vision_end_token_id}) is missing after the placeholder at {position}"
        raise InvalidParameterError("prompt", found, limit)
    return end


def _check_used(
    token_ids: list[int], counts: Mapping[int, list[int]], num_used: Mapping[int, int], vision: VisionConfig
) -> None:
    """Check that every image has its place, and that no other tokens are placeholders."""
    for placeholder, of_kind in counts.items():
        name = _names(placeholder == vision.video_token_id)
        if num_used[placeholder] < len(of_kind):
            limit = f"the prompt has placeholders for {num_used[placeholder]}"
            raise InvalidParameterError(name, f"{len(of_kind)} {name}", limit)
        num_found = token_ids.count(placeholder)
        if num_found != sum(of_kind):
            limit = f"{num_found - sum(of_kind)} placeholders are not between a vision start and a vision end token"
            raise InvalidParameterError("prompt", f"{num_found} placeholders", limit)


def _names(is_video: bool) -> str:
    return "videos" if is_video else "images"
