"""Rotary positions of three axes, time, height and width, as Qwen2-VL counts them (arXiv:2409.12191, section 2.1)."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpan:
    """Tokens of an image or video."""

    start: int
    frames: int
    rows: int  # of tokens
    columns: int
    interval: float = 1.0  # positions between frames

    @property
    def num_tokens(self) -> int:
        return self.frames * self.rows * self.columns


def rotary_positions(num_tokens: int, spans: Iterable[VisionSpan]) -> NDArray[np.int32]:
    """Return the positions [3, num_tokens] of a prompt's tokens.

    Text counts on all axes at once. An image has the text's next position on the first axis, and its rows and columns,
    from there on, on the others; the text behind it continues after the longer of its sides.
    """
    parts: list[NDArray[np.int64]] = []
    at = position = 0  # in tokens, and in what they count
    for span in spans:
        parts.append(_text(position, span.start - at))
        position += span.start - at
        times = (np.arange(span.frames, dtype=np.float32) * np.float32(span.interval)).astype(np.int64)
        axes = np.meshgrid(times, np.arange(span.rows), np.arange(span.columns), indexing="ij")
        parts.append(np.stack(axes).reshape(3, -1) + position)
        position += max(span.rows, span.columns)
        at = span.start + span.num_tokens
    parts.append(_text(position, num_tokens - at))
    return np.concatenate(parts, axis=1).astype(np.int32)


def _text(position: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(count, dtype=np.int64) + position, (3, count))
