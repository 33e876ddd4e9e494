"""Decodes the quantized blocks of GGUF files to integers with scales, or to floats.

Every quantized ggml type represents `scale * quant - offset`, with a scale, and in some types an offset, per group of
16 or 32 elements of a row. `unpack` converts all of them to this form. Layouts: ggml's ggml-common.h.

Legend: N = rows, K = elements per row, B = blocks per row, G = elements per group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.gguf.types import GgmlType

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """Rows of `scale * quant - offset`."""

    quants: Tensor  # [N, K] int8
    scales: Tensor  # [N, K / G] float32
    offsets: Tensor | None  # [N, K / G] float32

    def dequantized(self) -> Tensor:
        """Return float32 values [N, K]."""
        num_rows, size = self.quants.shape
        values = self.quants.view(num_rows, self.scales.shape[1], -1) * self.scales[..., None]
        if self.offsets is not None:
            values -= self.offsets[..., None]
        return values.view(num_rows, size)


def dequantize(data: Tensor, kind: GgmlType) -> Tensor:
    """Return the values of rows of bytes, [N, K]: float32; unquantized types keep their dtype."""
    if kind.name in _FLOATS:
        return data.view(_FLOATS[kind.name])
    return unpack(data, kind).dequantized()


def unpack(data: Tensor, kind: GgmlType) -> GroupedIntegers:
    """Return the integers and scales of rows of bytes `[N, bytes per row]`, of a quantized type."""
    num_rows = data.shape[0]
    quants, scales, offsets = _UNPACK[kind.name](data.reshape(num_rows, -1, kind.block_bytes))
    return GroupedIntegers(
        quants.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        None if offsets is None else offsets.reshape(num_rows, -1),
    )


_Parts = tuple[Tensor, Tensor, Tensor | None]  # per block of [N, B, bytes]: quants, scales, offsets


def _half(blocks: Tensor, begin: int) -> Tensor:
    """Return the float16 at a byte offset of each block, [N, B, 1] float32."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).float()


def _split_last(packed: Tensor, *sizes: int) -> Tensor:
    """Split the last axis into several."""
    return packed.reshape(*packed.shape[:-1], *sizes)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low nibbles of the last axis, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1).to(torch.int8)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the bits of 4 bytes, each shifted to bit 4, [N, B, 32]."""
    bits = (packed[..., None] >> _shifts(packed, range(8))) & 1
    return (bits.flatten(-2) << 4).to(torch.int8)


def _shifts(like: Tensor, amounts: range) -> Tensor:
    return torch.tensor(list(amounts), dtype=torch.uint8, device=like.device)


def _q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 2:18]) - 8, _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 4:20]), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Parts:
    return (_nibbles(blocks[..., 6:22]) | _fifth_bits(blocks[..., 2:6])) - 16, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 8:24]) | _fifth_bits(blocks[..., 4:8]), _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[..., 2:34].contiguous().view(torch.int8), _half(blocks, 0), None


def _crumbs(packed: Tensor) -> Tensor:
    """Return the 2-bit fields of two halves of 32 bytes: [N, B, 2, 4, 32], shift by shift."""
    halves = _split_last(packed, 2, 1, 32)
    return (halves >> _shifts(packed, range(0, 8, 2))[:, None]) & 3


def _q2_k(blocks: Tensor) -> _Parts:
    packed_scales = blocks[..., :16]
    scales = _half(blocks, 80) * (packed_scales & 15)
    return _crumbs(blocks[..., 16:80]).to(torch.int8), scales, _half(blocks, 82) * (packed_scales >> 4)


def _q3_k(blocks: Tensor) -> _Parts:
    high = (blocks[..., None, :32] >> _shifts(blocks, range(8))[:, None]) & 1  # [N, B, 8, 32]
    quants = _crumbs(blocks[..., 32:96]).flatten(-3, -2).to(torch.int8) - ((1 - high.to(torch.int8)) << 2)
    low, top = blocks[..., 96:104], blocks[..., 104:108]
    tops = (top[..., None, :] >> _shifts(blocks, range(0, 8, 2))[:, None]) & 3  # [N, B, 4, 4]
    scales = torch.cat([low & 15, low >> 4], -1) | (tops.flatten(-2) << 4)
    return quants, _half(blocks, 108) * (scales.to(torch.int8) - 32), None


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima from 12 bytes, as in Q4_K and Q5_K."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    return scales, torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    quants = _nibbles(_split_last(blocks[..., 16:144], 4, 32))
    return quants, _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q5_k(blocks: Tensor) -> _Parts:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    high = (blocks[..., None, 16:48] >> _shifts(blocks, range(8))[:, None]) & 1  # [N, B, 8, 32]
    low = _split_last(_nibbles(_split_last(blocks[..., 48:176], 4, 32)), 2, 32).flatten(-3, -2)
    return low | (high << 4).to(torch.int8), _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(_split_last(blocks[..., :128], 2, 64))  # [N, B, 2, 128]
    high = _crumbs(blocks[..., 128:192]).flatten(-2)
    quants = low | (high << 4).to(torch.int8)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return quants - 32, _half(blocks, 208) * scales, None


def _iq4_values(packed: Tensor) -> Tensor:
    table = torch.tensor(_IQ4_VALUES, dtype=torch.int8, device=packed.device)
    return table[_nibbles(packed).long()]


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _iq4_values(blocks[..., 2:18]), _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> _Parts:
    top, low = blocks[..., 2:4], blocks[..., 4:8]
    tops = (top[..., None] >> _shifts(blocks, range(0, 8, 2))) & 3  # [N, B, 2, 4]
    lows = torch.stack([low & 15, low >> 4], -1)
    scales = (lows.flatten(-2) | (tops.flatten(-2) << 4)).to(torch.int8) - 32
    return _iq4_values(_split_last(blocks[..., 8:136], 8, 16)), _half(blocks, 0) * scales, None


_UNPACK: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
