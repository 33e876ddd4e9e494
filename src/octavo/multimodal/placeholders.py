"""Placeholders of images and videos: written into a prompt's text, and among its tokens expanded to one per token.

Tokens on both sides of a placeholder depend on its text: line breaks around an image, the times of a video's frames.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError

_MAX_TOKENS = 1 << 22  # of an image: more than any context; placeholders are made before they meet that limit

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
    """Expand the placeholder of each image or video to one per token.

    Grids [images, 3] have each one's frames, rows and columns of patches. Only placeholders between vision start and
    end count, if the model has these tokens. Placeholders that have been expanded already are accepted.
    """
    counts = {vision.image_token_id: [vision.num_tokens(grid) for grid in checked_grids(image_grid_thw, vision)]}
    if vision.video_token_id is not None:
        counts[vision.video_token_id] = [vision.num_tokens(grid) for grid in checked_grids(video_grid_thw, vision)]
    find = _next_run if vision.vision_start_token_id is None else _next_between_marks
    token_ids: list[int] = []
    ranges: list[PlaceholderRange] = []
    num_used = dict.fromkeys(counts, 0)
    position = 0
    while (place := find(input_ids, position, counts, vision)) is not None:
        placeholder = input_ids[place.start]
        of_kind, is_video = counts[placeholder], placeholder == vision.video_token_id
        if num_used[placeholder] == len(of_kind):
            at = place.start - (vision.vision_start_token_id is not None)
            limit = f"the prompt has a placeholder for another one (token {at})"
            raise InvalidParameterError(_names(is_video), f"{len(of_kind)} {_names(is_video)}", limit)
        count = of_kind[num_used[placeholder]]
        num_used[placeholder] += 1
        token_ids += input_ids[position : place.start]
        ranges.append(PlaceholderRange(len(token_ids), count, is_video))
        token_ids += [placeholder] * count
        position = place.stop
    token_ids += input_ids[position:]
    _check_used(token_ids, counts, num_used, vision)
    return ExpandedPrompt(token_ids, ranges)


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


def _next_between_marks(
    input_ids: Sequence[int], start: int, counts: Mapping[int, list[int]], vision: VisionConfig
) -> range | None:
    """Return the next placeholders, between vision start and end; None: there are no more."""
    for first in range(start + 1, len(input_ids)):
        if input_ids[first - 1] != vision.vision_start_token_id or input_ids[first] not in counts:
            continue
        end = next((at for at in range(first, len(input_ids)) if input_ids[at] != input_ids[first]), len(input_ids))
        if end == len(input_ids) or input_ids[end] != vision.vision_end_token_id:
            found = "the end of the prompt" if end == len(input_ids) else f"token {input_ids[end]}"
            limit = f"the vision end token ({vision.vision_end_token_id}) is missing after the placeholder at {first}"
            raise InvalidParameterError("prompt", found, limit)
        return range(first, end)
    return None


def _next_run(
    input_ids: Sequence[int], start: int, counts: Mapping[int, list[int]], vision: VisionConfig
) -> range | None:
    """Return the next placeholder, which is alone or has been expanded before; None: there are no more."""
    for position in range(start, len(input_ids)):
        if input_ids[position] in counts:
            of_kind = counts[input_ids[position]]
            is_expanded = input_ids.count(input_ids[position]) == sum(of_kind)
            run = range(position, position + (of_kind[0] if is_expanded else 1))
            if set(input_ids[run.start : run.stop]) != {input_ids[position]}:
                limit = f"{len(run)} placeholders in a row are expected from token {position} on, for each image"
                raise InvalidParameterError("prompt", "other tokens among placeholders", limit)
            return run
    return None


def _check_used(
    token_ids: list[int], counts: Mapping[int, list[int]], num_used: Mapping[int, int], vision: VisionConfig
) -> None:
    """Check that every image has a placeholder, and that there are no others."""
    for placeholder, of_kind in counts.items():
        name = _names(placeholder == vision.video_token_id)
        if num_used[placeholder] < len(of_kind):
            limit = f"the prompt has placeholders for {num_used[placeholder]}"
            raise InvalidParameterError(name, f"{len(of_kind)} {name}", limit)
        num_found = token_ids.count(placeholder)
        if num_found != sum(of_kind):
            limit = f"{num_found - sum(of_kind)} of them are not between a vision start and a vision end token"
            raise InvalidParameterError("prompt", f"{num_found} placeholders", limit)


def _names(is_video: bool) -> str:
    return "videos" if is_video else "images"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceholderTexts:
    """The tokens of `VisionConfig` as text; empty: the model has none."""

    image: str
    video: str
    start: str
    end: str
    around: str | None  # see `VisionConfig.text_around`
    has_frame_times: bool

    @classmethod
    def of(cls, vision: VisionConfig, token_text: Callable[[int], str]) -> Self:
        ids = vision.image_token_id, vision.video_token_id, vision.vision_start_token_id, vision.vision_end_token_id
        image, video, start, end = ("" if token_id is None else token_text(token_id) for token_id in ids)
        times = vision.has_frame_times
        return cls(image=image, video=video, start=start, end=end, around=vision.text_around, has_frame_times=times)

    def write_out(self, text: str, times_s: Sequence[Sequence[float] | None]) -> str:
        """Return the text with all placeholders; `times_s` are those of each video's groups of frames."""
        # Templates of some models write only the token that begins an image.
        if self.around is not None and self.start + self.image not in text:
            text = text.replace(self.start, self.around + self.start + self.image + self.end + self.around)
        if not self.has_frame_times or not times_s:
            return text
        pieces = text.split(self.start + self.video + self.end)
        if len(pieces) != len(times_s) + 1:
            limit = f"the prompt has placeholders for {len(pieces) - 1}"
            raise InvalidParameterError("videos", f"{len(times_s)} videos", limit)
        for at, of_video in enumerate(times_s, start=1):
            assert of_video is not None, "videos of this model are read with their times"
            groups = (f"<{time_s:.1f} seconds>{self.start}{self.video}{self.end}" for time_s in of_video)
            pieces[at] = "".join(groups) + pieces[at]
        return "".join(pieces)
