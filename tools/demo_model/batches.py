"""Packs documents into training rows. A step's rows depend only on (seed, step), so a run can be resumed."""

from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from tools.demo_model.bpe import token_id
from tools.demo_model.corpus import documents
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's tokens: B rows of T tokens, and the target of each."""

    ids: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    has_loss: Tensor  # [B, T] bool: tokens that the model writes, as opposed to its input


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Token ids that delimit the model's own text in a chat."""

    start: int
    end: int
    think: int
    line_end: int
    equals: int
    header: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Marks":
        """Look up the token ids."""
        start, end, think = (token_id(tokenizer, mark) for mark in ("<|im_start|>", "<|im_end|>", "<think>"))
        (line_end,), (equals,) = (tokenizer.encode(text).ids for text in ("\n", " ="))
        header = tuple(tokenizer.encode("<|im_start|>assistant\n").ids)
        return cls(start=start, end=end, think=think, line_end=line_end, equals=equals, header=header)


def written_by_model(ids: list[int], marks: Marks) -> list[bool]:
    """Return which tokens of a document carry loss: answers in a chat, most of plain text."""
    if ids[0] != marks.start:
        return without_given_sums(ids, marks)
    size, is_answer, out = len(marks.header), False, [False] * len(ids)
    for at, token in enumerate(ids):
        if token == marks.start:
            is_answer = False
        elif tuple(ids[at - size : at]) == marks.header and at >= size:
            is_answer = True
        out[at] = is_answer
        if token == marks.end:
            is_answer = False
    return without_given_thoughts(ids, out, marks)


def without_given_sums(ids: list[int], marks: Marks) -> list[bool]:
    """Return a mask of plain text except what precedes an equals sign in its line, which is unpredictable."""
    written, line = [True] * len(ids), 0
    for at, token in enumerate(ids):
        if token == marks.line_end:
            line = at + 1
        elif token == marks.equals:
            written[line : at + 1] = [False] * (at + 1 - line)
    return written


def without_given_thoughts(ids: list[int], written: list[bool], marks: Marks) -> list[bool]:
    """Remove loss from the opening think tag and its newline, as the prompt decides whether to think."""
    for at, token in enumerate(ids):
        if token == marks.think:
            written[at] = written[at + 1] = False
    return written


class Packer:
    """Fills rows with documents; the last one is truncated. Every row starts with a new document."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed, self.marks = tokenizer, seed, Marks.of(tokenizer)

    def batch(self, step: int, num_rows: int, length: int) -> Batch:
        """Return a step's batch: `num_rows` rows of `length` tokens."""
        rows = [self.row(f"{self.seed} {step} {row}", length + 1) for row in range(num_rows)]
        ids = torch.from_numpy(np.array([row[0] for row in rows], dtype=np.int64))  # [B, T + 1]
        written = torch.from_numpy(np.array([row[1] for row in rows], dtype=np.bool_))  # [B, T + 1]
        return Batch(ids=ids[:, :-1], targets=ids[:, 1:], has_loss=written[:, 1:])

    def row(self, seed: str, length: int) -> tuple[list[int], list[bool]]:
        """Return one row's tokens and its loss mask."""
        ids: list[int] = []
        written: list[bool] = []
        stream = documents(seed)
        while len(ids) < length:
            tokens = self.tokenizer.encode(next(stream), add_special_tokens=False).ids
            ids += tokens
            written += written_by_model(tokens, self.marks)
        return ids[:length], written[:length]
