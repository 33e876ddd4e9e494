"""Rotary positions of three axes, time, height and width, as Qwen2-VL counts them (arXiv:2409.12191, section 2.1)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.config.vision import VisionConfig
from octavo.contracts.engine import VisionInput


def rotary_positions(num_tokens: int, vision: Sequence[VisionInput], config: VisionConfig) -> NDArray[np.int32]:
    """Return the positions [3, num_tokens] of a prompt's tokens.

    Text counts on all axes at once. An image has the text's next position on the first axis, and its rows and columns,
    from there on, on the others; the text behind it continues after the longer of its sides.
    """
    parts: list[NDArray[np.int64]] = []
    at = position = 0  # in tokens, and in what they count
    for image in vision:
        parts.append(_text(position, image.start - at))
        position += image.start - at
        frames, rows, columns = image.grid[0], *(side // config.spatial_merge_size for side in image.grid[1:])
        axes = np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij")
        parts.append(np.stack(axes).reshape(3, -1) + position)
        position += max(rows, columns)
        at = image.start + image.num_tokens
    parts.append(_text(position, num_tokens - at))
    return np.concatenate(parts, axis=1).astype(np.int32)


def _text(position: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(count, dtype=np.int64) + position, (3, count))
