"""Where the patches of images are: their rotary positions, and the segments that attend to one another.

Patches are in the order in which the processor writes them: frame by frame, in each of them one square of merged
patches after the other. Legend: P = patches of an image, M = merged squares of it.
"""

from dataclasses import dataclass
from typing import Self

import torch

from octavo.config.vision import VisionConfig

Grid = tuple[int, int, int]  # of an image: (pairs of) frames, rows and columns of patches


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchLayout:
    """The patches of one image in the order in which the tower computes them."""

    order: torch.Tensor | None  # [M] int64: each merged square, by its number in the input; None: as in the input
    rows: torch.Tensor  # [P] int64
    columns: torch.Tensor  # [P] int64
    frames: list[int]  # patches of each frame: layers that see the whole image attend within these
    windows: list[int]  # patches of each window; equals `frames` where there are none

    @classmethod
    def of(cls, grid: Grid, config: VisionConfig) -> Self:
        """Lay out an image."""
        num_frames, height, width = grid
        rows, columns = (axis.repeat(num_frames) for axis in _positions(height, width, config.spatial_merge_size))
        frames = [height * width] * num_frames
        if config.window_size is None:
            return cls(order=None, rows=rows, columns=columns, frames=frames, windows=frames)
        order, windows = _window_order(grid, config)
        unit = config.merge_unit
        rows, columns = (axis.view(-1, unit)[order].flatten() for axis in (rows, columns))
        return cls(order=order, rows=rows, columns=columns, frames=frames, windows=windows)


def _positions(height: int, width: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and columns [P] of a frame's patches, in squares of merge x merge."""
    squares = (height // merge, merge, width // merge, merge)
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width).expand(height, width)
    rows, columns = (axis.reshape(squares).transpose(1, 2).flatten() for axis in (rows, columns))
    return rows, columns


def _window_order(grid: Grid, config: VisionConfig) -> tuple[torch.Tensor, list[int]]:
    """Return the merged squares [M], window by window, and the patches of each window.

    Windows are squares of `window_size` pixels; those at the right and lower edges are smaller.
    """
    assert config.window_size is not None
    num_frames, height, width = grid
    merge = config.spatial_merge_size
    side = config.window_size // merge // config.patch_size
    numbers = torch.arange(num_frames * (height // merge) * (width // merge))
    order, lengths = [], []
    for frame in numbers.view(num_frames, height // merge, width // merge):
        for band in frame.split(side, dim=0):
            for window in band.split(side, dim=1):
                order.append(window.flatten())
                lengths.append(window.numel() * config.merge_unit)
    return torch.cat(order), lengths
