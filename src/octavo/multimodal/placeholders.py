"""Prompts with images and videos: their placeholders, and `MultiModalPrompt`, the tokens and images of a request.

Placeholders are written into a prompt's text, and among its tokens expanded to one per token. Tokens on both sides of
one depend on its text: line breaks around an image, the times of a video's frames.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.model import VisionConfig
from octavo.contracts.engine import EmbeddingSpan, ExtraInputs, VisionInput
from octavo.errors import InvalidParameterError
from octavo.multimodal.image_processors import Grid, Patches, checked_grids


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


def write_placeholders(
    text: str, times_s: Sequence[Sequence[float] | None], vision: VisionConfig, token_text: Callable[[int], str]
) -> str:
    """Return the text with all placeholders; `times_s` are those of each video's groups of frames."""
    ids = vision.image_token_id, vision.video_token_id, vision.vision_start_token_id, vision.vision_end_token_id
    image, video, start, end = ("" if token_id is None else token_text(token_id) for token_id in ids)
    around = vision.text_around
    if around is not None and start + image not in text:  # some templates write only the token that begins an image
        text = text.replace(start, around + start + image + end + around)
    if not vision.has_frame_times or not times_s:
        return text
    pieces = text.split(start + video + end)
    if len(pieces) != len(times_s) + 1:
        limit = f"the prompt has placeholders for {len(pieces) - 1}"
        raise InvalidParameterError("videos", f"{len(times_s)} videos", limit)
    for at, of_video in enumerate(times_s, start=1):
        assert of_video is not None, "videos of this model are read with their times"
        pieces[at] = "".join(f"<{time_s:.1f} seconds>{start}{video}{end}" for time_s in of_video) + pieces[at]
    return "".join(pieces)


def rotary_positions(num_tokens: int, spans: Iterable[tuple[int, Grid, float]]) -> NDArray[np.int32]:
    """Return the positions [3, num_tokens] of a prompt's tokens by time, height and width.

    `spans` are those of images and videos: the first token, frames, rows and columns of tokens, and the positions
    between frames. Counted as in Qwen2-VL (arXiv:2409.12191, section 2.1):

    Text counts on all axes at once. An image has the text's next position on the first axis, and its rows and columns,
    from there on, on the others; the text behind it continues after the longer of its sides.
    """
    parts: list[NDArray[np.int64]] = []
    at = position = 0  # in tokens, and in what they count
    for start, (frames, rows, columns), interval in spans:
        parts.append(_text(position, start - at))
        position += start - at
        times = (np.arange(frames, dtype=np.float32) * np.float32(interval)).astype(np.int64)
        axes = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
        parts.append(np.stack(axes).reshape(3, -1) + position)
        position += max(rows, columns)
        at = start + frames * rows * columns
    parts.append(_text(position, num_tokens - at))
    return np.concatenate(parts, axis=1).astype(np.int32)


def _text(position: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(count, dtype=np.int64) + position, (3, count))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """An image as precomputed embeddings."""

    values: NDArray[np.float32]  # [tokens, hidden size]
    grid: Grid
    interval: float = 1.0


Medium = Patches | Embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiModalPrompt:
    """A prompt for `InputProcessor.process`: complete and validated, except for its length."""

    text: str | None
    token_ids: list[int]
    extra_inputs: ExtraInputs

    @classmethod
    def of(cls, text: str | None, prompt: ExpandedPrompt, media: Sequence[Medium], config: VisionConfig) -> Self:
        """Match images and videos, in the order of the prompt, with their placeholders."""
        places = list(zip(prompt.ranges, media, strict=True))
        positions = _rotary_positions(prompt, media, config) if config.has_rotary_axes else None
        spans = [(place.start, place.start + place.num_tokens) for place, _ in places]
        extra = ExtraInputs(
            rotary_positions=None if positions is None else positions.tobytes(),
            vision=[_input(place, medium) for place, medium in places if isinstance(medium, Patches)],
            embedding_spans=[
                EmbeddingSpan(start=place.start, num_tokens=place.num_tokens, embeddings=medium.values.tobytes())
                for place, medium in places
                if isinstance(medium, Embeddings)
            ],
            whole_spans=spans if config.is_bidirectional else [],
        )
        return cls(text=text, token_ids=prompt.token_ids, extra_inputs=extra)


def _rotary_positions(prompt: ExpandedPrompt, media: Sequence[Medium], config: VisionConfig) -> NDArray[np.int32]:
    merge, spans = config.spatial_merge_size, []
    for place, medium in zip(prompt.ranges, media, strict=True):
        frames, rows, columns = medium.grid
        spans.append((place.start, (frames, rows // merge, columns // merge), medium.interval))
    positions = rotary_positions(len(prompt.token_ids), spans)
    if positions.size and int(positions.max()) >= len(prompt.token_ids):
        limit = "frames of a video are so far apart that their positions exceed the tokens; give a higher fps"
        raise InvalidParameterError("videos", f"position {positions.max()}", limit)
    return positions


def _input(place: PlaceholderRange, image: Patches) -> VisionInput:
    return VisionInput(
        start=place.start,
        num_tokens=place.num_tokens,
        grid=image.grid,
        content_hash=image.content_hash,
        patches=image.values,
        levels=image.levels,
    )
