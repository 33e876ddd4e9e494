"""Weights in the blocks of GGUF files: decoded, or computed as stored, neither quantized again nor dequantized.

Every quantized ggml type represents `scale * quant - offset`, with a scale, and in some types an offset, per group of
16 or 32 elements of a row. `unpack` converts all of them to this form. Layouts: ggml's ggml-common.h.

A weight keeps its file's bytes until kernels repack them. Activations are quantized to 8 bits in groups of 32, each
with a scale; products are summed exactly over the inputs that share a scale, and these sums are added in float32, in
order. So a row's result depends on that row alone.

Legend: T = tokens, N = outputs, K = inputs, B = blocks per row, G = groups of a row, R = bytes of a row in the file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from octavo.gguf.decoding import decode
from octavo.gguf.types import GGML_NUMBERS, GGML_TYPES, GgmlType

GROUP_SIZE = 32  # inputs that share a scale of activations
_MAX = 127.0
_VANISHING = 2.0**-120  # a group of less counts as zeros
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # in halves
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """The block types of a weight [N, K]. Parts, stacked by outputs, may have different types."""

    types: tuple[str, ...]  # of each part, ggml's names
    sizes: tuple[int, ...]  # its outputs
    first_input: int = 0  # of the rows in the file, where a rank holds some inputs only
    row_inputs: int  # of the rows in the file

    @property
    def bits(self) -> float:
        """Bits per weight in the file."""
        bits = (
            8 * kind.block_bytes / kind.block_size * size for kind, size in zip(self.kinds, self.sizes, strict=True)
        )
        return sum(bits) / max(1, sum(self.sizes))

    @property
    def kinds(self) -> list[GgmlType]:
        """The types themselves."""
        return [GGML_TYPES[GGML_NUMBERS[name]] for name in self.types]

    @property
    def numbers(self) -> list[int]:
        """Their numbers in ggml."""
        return [GGML_NUMBERS[name] for name in self.types]

    def num_bytes(self, num_outputs: int, in_size: int) -> int:
        """Return the size of a weight [N, K] of these blocks in a file; repacked ones take up to a tenth more."""
        return int(num_outputs * in_size * self.bits / 8)

    def span(self, in_size: int) -> int:
        """Return how many groups share an outer scale: those of a block, or fewer if the inputs begin inside one."""
        most = max(kind.block_size for kind in self.kinds)
        stop = self.first_input + in_size
        return math.gcd(most, self.first_input, 0 if stop == self.row_inputs else stop) // GROUP_SIZE

    def runs(self) -> list[list[int]]:
        """Return the numbers of neighboring parts of one type."""
        return [list(run) for _, run in groupby(range(len(self.types)), key=self.types.__getitem__)]

    def first(self, count: int) -> "BlockFormat":
        """Return the format of the first `count` outputs."""
        ends = accumulate(self.sizes)
        sizes = [size - max(0, end - count) for size, end in zip(self.sizes, ends, strict=True) if end - size < count]
        return replace(self, types=self.types[: len(sizes)], sizes=tuple(sizes))

    def joined(self) -> "BlockFormat":
        """Return the same with each run as one part."""
        types = tuple(self.types[run[0]] for run in self.runs())
        return replace(self, types=types, sizes=tuple(sum(self.sizes[part] for part in run) for run in self.runs()))


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWeight:
    """A weight [N, K] as in the file: whole rows of each part, of which K inputs are used."""

    format: BlockFormat
    parts: tuple[Tensor, ...]  # [N of the part, R] uint8
    in_size: int  # K

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.format.sizes), self.in_size

    def dequantized(self) -> Tensor:
        """Return the weight [N, K] in float32."""
        inputs = slice(self.format.first_input, self.format.first_input + self.in_size)
        parts = zip(self.parts, self.format.kinds, strict=True)
        return torch.cat([dequantize(rows, kind)[:, inputs] for rows, kind in parts])

    def joined(self) -> "BlockWeight":
        """Return the same weight with neighboring parts of one type as one part."""
        runs = ([self.parts[part] for part in run] for run in self.format.runs())
        parts = tuple(torch.cat(run) if len(run) > 1 else run[0] for run in runs)
        return replace(self, format=self.format.joined(), parts=parts)


def stack_blocks(weights: list[BlockWeight]) -> BlockWeight:
    """Stack weights of the same inputs by outputs. Parts stay parts."""
    types = tuple(name for weight in weights for name in weight.format.types)
    sizes = tuple(size for weight in weights for size in weight.format.sizes)
    form = replace(weights[0].format, types=types, sizes=sizes)
    return replace(weights[0], format=form, parts=tuple(part for weight in weights for part in weight.parts))


def integer_groups(x: Tensor, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] to int8 [T, groups, group_size], to nearest, ties to even; also return scales [T, groups, 1].

    A scale is max|x| / 127 of its group. A row that is not finite gets scales of NaN.
    """
    groups = x.float().view(len(x), -1, group_size)
    is_finite = groups.isfinite().all(-1).all(-1)[:, None, None]
    largest = torch.where(is_finite, groups, 0.0).abs().amax(-1, keepdim=True)
    is_computed, most = largest >= _VANISHING, torch.full_like(largest, _MAX)
    values = torch.where(is_finite & is_computed, groups, 0.0) * torch.where(is_computed, most / largest, 0.0)
    scales = torch.where(is_computed, largest / most, 0.0)
    return values.round().to(torch.int8), torch.where(is_finite, scales, torch.nan)


def block_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
    """Apply a weight and bias [N] to x [T, K]: [T, N] float32. The definition that kernels are compared with."""
    values, scales = integer_groups(x)
    totals = []
    for rows, kind in zip(weight.parts, weight.format.kinds, strict=True):
        quants, of_weight, offsets = unpack(rows, kind)
        size = quants.shape[1] // of_weight.shape[1]  # inputs that share a scale of the weight: 16 or 32
        inputs, total = values.view(len(x), -1, size).double(), torch.zeros(len(x), len(rows), device=x.device)
        for group in range(inputs.shape[1]):
            at, scale = weight.format.first_input // size + group, scales[:, group * size // GROUP_SIZE]
            sums = (inputs[:, group] @ quants[:, at * size : (at + 1) * size].double().T).float()
            total += sums * (of_weight[:, at] * scale)
            if offsets is not None:
                total -= offsets[:, at] * (inputs[:, group].sum(-1, keepdim=True).float() * scale)
        totals.append(total)
    result = torch.cat(totals, dim=1)
    return result if bias is None else result + bias.float()


def dequantize(data: Tensor, kind: GgmlType) -> Tensor:
    """Return the values of rows of bytes, [N, K]: float32; unquantized types keep their dtype."""
    if kind.name in _FLOATS:
        return data.view(_FLOATS[kind.name])
    if kind.is_decoded:
        return torch.from_numpy(decode(data.numpy(), kind))
    quants, scales, offsets = unpack(data, kind)
    values = quants.view(*scales.shape, -1) * scales[..., None]
    if offsets is not None:
        values -= offsets[..., None]
    return values.view(quants.shape)


_Parts = tuple[Tensor, Tensor, Tensor | None]  # per block of [N, B, bytes]: quants, scales, offsets


def unpack(data: Tensor, kind: GgmlType) -> _Parts:
    """Return quants [N, K] int8, scales and offsets [N, G] float32 of rows of bytes `[N, R]`, of a quantized type."""
    num_rows = len(data)
    quants, scales, offsets = _UNPACK[kind.name](data.reshape(num_rows, -1, kind.block_bytes))
    flat_offsets = None if offsets is None else offsets.reshape(num_rows, -1)
    return quants.reshape(num_rows, -1), scales.reshape(num_rows, -1), flat_offsets


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


def _values_of(packed: Tensor, values: tuple[int, ...]) -> Tensor:
    """Return what the nibbles stand for in a table."""
    return torch.tensor(values, dtype=torch.int8, device=packed.device)[_nibbles(packed).long()]


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _values_of(blocks[..., 2:18], _IQ4_VALUES), _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> _Parts:
    top, low = blocks[..., 2:4], blocks[..., 4:8]
    tops = (top[..., None] >> _shifts(blocks, range(0, 8, 2))) & 3  # [N, B, 2, 4]
    lows = torch.stack([low & 15, low >> 4], -1)
    scales = (lows.flatten(-2) | (tops.flatten(-2) << 4)).to(torch.int8) - 32
    return _values_of(_split_last(blocks[..., 8:136], 8, 16), _IQ4_VALUES), _half(blocks, 0) * scales, None


def _mxfp4(blocks: Tensor) -> _Parts:
    """Values of E2M1, exponents of E8M0 (Rouhani et al. 2023, arXiv:2310.10537)."""
    exponents = blocks[..., :1].to(torch.int32) - 1  # of half the scale; the least two are of subnormal numbers
    scales = torch.where(exponents > 0, exponents << 23, 0x400000 >> -exponents.clamp(max=0)).view(torch.float32)
    return _values_of(blocks[..., 1:17], _MXFP4_VALUES), scales, None


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
    "MXFP4": _mxfp4,
}
