"""Attention of encoders: bidirectional within each segment; nothing is cached between steps.

Legend: P = rows of all segments, one segment after the other, H = heads, E = head size, S = segments.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.attention.metadata import RotaryTable


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderHeads:
    """One layer's heads on this rank."""

    count: int  # H
    size: int  # E


class EncoderSegments(ABC):
    """Segments of a step, and their attention: made once, used by all layers that have these segments."""

    @abstractmethod
    def attend(self, qkv: Tensor, heads: EncoderHeads) -> Tensor:
        """Rotate queries and keys of qkv [P, 3 * H * E], then attend within each segment: [P, H * E]."""


class SdpaSegments(EncoderSegments):
    """By torch's own op: the definition. Adjacent segments of one length are computed together."""

    def __init__(self, lengths: Sequence[int], rotary: RotaryTable | None) -> None:
        """Take the `lengths` [S], which add up to P, and cos and sin, [P, E / 2] float32 each; None: no rotation."""
        self._lengths, self._rotary = lengths, rotary

    def attend(self, qkv: Tensor, heads: EncoderHeads) -> Tensor:
        """See `EncoderSegments.attend`."""
        query, key, value = qkv.view(len(qkv), 3, heads.count, heads.size).unbind(1)  # [P, H, E] each
        if self._rotary is not None:
            query, key = _rotated(query, *self._rotary), _rotated(key, *self._rotary)
        return torch.cat([*self._parts(query, key, value)]).reshape(len(qkv), -1)

    def _parts(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """Yield the attention of each segment, or of adjacent ones of one length: [., H, E]."""
        start = 0
        for length, run in groupby(self._lengths):
            count = sum(1 for _ in run)
            end = start + count * length
            q, k, v = (of[start:end].view(count, length, *of.shape[1:]).transpose(1, 2) for of in (query, key, value))
            yield scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
            start = end


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head, [P, H, E], in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
