"""`MultiModalPrompt`: the tokens and images of a request, as the processor prepared them."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.vision import VisionConfig
from octavo.contracts.engine import EmbeddingSpan, ExtraInputs, VisionInput
from octavo.errors import InvalidParameterError
from octavo.multimodal.image_processors import Patches
from octavo.multimodal.placeholders import ExpandedPrompt, Grid, PlaceholderRange


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


def content_hash(image: Patches) -> str:
    """Return SHA-256 over grid, interval, levels and patches: of the content, whatever its name or address."""
    digest = hashlib.sha256(np.array(image.grid, dtype="<i8").tobytes())
    digest.update(np.array(image.interval, dtype="<f8").tobytes())
    if image.levels is not None:
        digest.update(np.ascontiguousarray(image.levels, dtype="<f4").data)
    digest.update(np.ascontiguousarray(image.values).data)
    return digest.hexdigest()


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
        content_hash=content_hash(image),
        patches=image.values,
        levels=image.levels,
    )
