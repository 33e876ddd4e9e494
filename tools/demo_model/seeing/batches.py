"""The pictures and rows of one step. They depend only on (seed, step), so a run can be resumed.

Legend: B = rows, T = tokens of a row, P = patches of all pictures, M = tokens of a picture.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from tools.demo_model.seeing.conversations import MIXED, Asking, Row, blind_question, questions, row
from tools.demo_model.seeing.drawing import Mark, Size, draw, random_size
from tools.demo_model.seeing.scenes import COLOURS, SHAPES, Range, Scene, scene
from torch import Tensor

from octavo.multimodal.image_processors import ImageProcessor, Patches
from octavo.multimodal.placeholders import rotary_positions

KINDS = (*SHAPES, *"0123456789")
_SEEN = {kind: index for index, kind in enumerate(KINDS, 1)}
_COLOUR = {colour: index for index, colour in enumerate(COLOURS, 1)}
IMAGE_START = 3  # tokens of a row before its picture: start of the turn, "user", newline, then the vision start


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step."""

    ids: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    answers: Tensor  # [B, T] int64: which answer of the step a target is in, from 1; 0: it has no loss
    tasks: tuple[str, ...]  # of the answers
    positions: Tensor  # [3, B, T] int64
    sees: Tensor | None  # [B, 1, T, T] bool: which tokens each one sees; None: all before it
    patches: Tensor | None  # [P, values] float32
    grid: tuple[int, int, int]  # of every picture
    seen: Tensor  # [B * M, 3] int64: kind and colour of what has its middle in a picture's token (0: nothing), place


class Batches:
    """Draws and packs."""

    def __init__(
        self, tokenizer: Tokenizer, processor: ImageProcessor, seed: int, num_rows: int, blind_every: int
    ) -> None:
        self.tokenizer, self.processor, self.seed, self.num_rows = tokenizer, processor, seed, num_rows
        self.blind_every = blind_every  # steps: the last of them has no pictures
        self.merge_size = processor.vision.spatial_merge_size

    def batch(self, step: int, within: Range, asking: Asking = MIXED) -> Batch:
        """Return a step's batch; all pictures have one grid."""
        rng = random.Random(f"{self.seed} {step}")
        if step % self.blind_every == self.blind_every - 1:
            rows = [row(self.tokenizer, [blind_question(rng)], 0) for _ in range(self.num_rows)]
            return self._packed(rows, None, (0, 0, 0), torch.zeros(0, 3, dtype=torch.long))
        rows, pictures, seen = [], [], []
        for _ in range(self.num_rows):
            drawn, marks, patches = self._picture(rng, within)
            grid = patches.grid
            num_tokens = grid[1] * grid[2] // self.merge_size**2
            rows.append(row(self.tokenizer, questions(drawn, rng, asking), num_tokens, apart=asking.apart))
            pictures.append(normalized(patches))
            seen.append(
                _labels(
                    marks,
                    (
                        grid[2] // self.merge_size,
                        grid[1] // self.merge_size,
                    ),
                )
            )
        return self._packed(rows, torch.cat(pictures), grid, torch.cat(seen))

    def _picture(self, rng: random.Random, within: Range) -> tuple[Scene, list[Mark], Patches]:
        """Draw a scene that is not held out; return what is where, and the patches."""
        drawn = scene(rng, within, held_out=False)
        picture, marks = draw(drawn, random_size(rng), rng)
        return drawn, marks, self.processor.process([picture], "picture")

    def _packed(self, rows: Sequence[Row], patches: Tensor | None, grid: tuple[int, int, int], seen: Tensor) -> Batch:
        length = max(len(each.ids) for each in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        answers = torch.zeros(len(rows), length, dtype=torch.long)
        branches = torch.zeros(len(rows), length, dtype=torch.long)
        places = torch.zeros(len(rows), length, dtype=torch.long)
        tasks: list[str] = []
        for at, each in enumerate(rows):
            ids[at, : len(each.ids)] = torch.tensor(each.ids)
            numbers = torch.tensor(each.answers)
            answers[at, : len(each.ids)] = torch.where(numbers > 0, numbers + len(tasks), 0)
            tasks += each.tasks
            branches[at, : len(each.ids)] = torch.tensor(each.branches)
            places[at, : len(each.ids)] = torch.tensor(each.places)
        merge = self.merge_size
        spans = [(IMAGE_START + 1, (1, grid[1] // merge, grid[2] // merge), 1.0)]
        positions = torch.from_numpy(rotary_positions(length, spans if patches is not None else [])).long()
        return Batch(
            ids=ids[:, :-1],
            targets=ids[:, 1:],
            answers=answers[:, 1:],
            tasks=tuple(tasks),
            positions=positions[:, places[:, :-1]],
            sees=_sees(branches[:, :-1]) if branches.any() else None,
            patches=patches,
            grid=grid,
            seen=seen,
        )


def _sees(branches: Tensor) -> Tensor:
    """Return which tokens each one sees: those before it that are in no other branch [B, 1, T, T]."""
    of_query, of_key = branches[:, :, None], branches[:, None, :]
    return (((of_key == 0) | (of_key == of_query)).tril())[:, None]


def normalized(patches: Patches) -> Tensor:
    """Return the numbers of a picture's patches [P, values], as the model reads them."""
    assert patches.levels is not None
    channels, values = len(patches.levels), patches.values
    by_channel = values.reshape(len(values), channels, -1)
    levels = [patches.levels[channel][by_channel[:, channel]] for channel in range(channels)]
    return torch.from_numpy(np.stack(levels, axis=1).reshape(values.shape))


def _labels(marks: Sequence[Mark], size: Size) -> Tensor:
    """Return what has its middle in each token of a picture, and the token's place [M, 3], row by row."""
    width, height = size
    assert width == height == 3  # a token for each place
    labels = torch.zeros(height, width, 3, dtype=torch.long)
    labels[..., 2] = torch.arange(9).view(3, 3)
    for mark in marks:
        labels[int(mark.y * height), int(mark.x * width), :2] = torch.tensor([_SEEN[mark.kind], _COLOUR[mark.colour]])
    return labels.flatten(0, 1)
