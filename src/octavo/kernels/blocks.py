"""Weights in the blocks of GGUF files, computed as stored: neither quantized again nor dequantized.

A weight keeps its file's bytes until kernels repack them. Activations are quantized to 8 bits in groups of 32, each
with a scale; products are summed exactly over the inputs that share a scale, and these sums are added in float32, in
order. So a row's result depends on that row alone.

Legend: T = tokens, N = outputs, K = inputs, G = groups of 32 inputs, R = bytes of a row in the file.
"""

import math
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from octavo.gguf.types import GGML_NUMBERS, GGML_TYPES, GgmlType
from octavo.kernels.ggml_blocks import unpack

GROUP_SIZE = 32  # inputs that share a scale of activations
_MAX = 127.0
_VANISHING = 2.0**-120  # a group of less counts as zeros


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
        return torch.cat([unpack(rows, kind).dequantized()[:, inputs] for rows, kind in parts])

    def joined(self) -> "BlockWeight":
        """Return the same weight with neighboring parts of one type as one part."""
        parts = tuple(torch.cat([self.parts[part] for part in run]) for run in self.format.runs())
        return replace(self, format=self.format.joined(), parts=parts)


def stack_blocks(weights: list[BlockWeight]) -> BlockWeight:
    """Stack weights of the same inputs by outputs. Parts stay parts."""
    types = tuple(name for weight in weights for name in weight.format.types)
    sizes = tuple(size for weight in weights for size in weight.format.sizes)
    form = replace(weights[0].format, types=types, sizes=sizes)
    return replace(weights[0], format=form, parts=tuple(part for weight in weights for part in weight.parts))


def integer_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] to int8 [T, G, 32], to nearest, ties to even; also return the scales [T, G, 1].

    A scale is max|x| / 127 of its group. A row that is not finite gets scales of NaN.
    """
    groups = x.float().view(len(x), -1, GROUP_SIZE)
    is_finite = groups.isfinite().all(-1).all(-1)[:, None, None]
    largest = torch.where(is_finite, groups, 0.0).abs().amax(-1, keepdim=True)
    is_computed, most = largest >= _VANISHING, torch.full_like(largest, _MAX)
    values = torch.where(is_finite & is_computed, groups, 0.0) * torch.where(is_computed, most / largest, 0.0)
    scales = torch.where(is_computed, largest / most, 0.0)
    return values.round().to(torch.int8), torch.where(is_finite, scales, torch.nan)


def block_linear(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
    """Apply a weight and bias [N] to x [T, K]: [T, N] float32. The definition that kernels are compared with."""
    values, scales = integer_groups(x)
    first_group, num_groups = weight.format.first_input // GROUP_SIZE, weight.in_size // GROUP_SIZE
    totals = []
    for rows, kind in zip(weight.parts, weight.format.kinds, strict=True):
        unpacked = unpack(rows, kind)
        per_group = unpacked.scales.shape[1] * GROUP_SIZE // unpacked.quants.shape[1]  # 1, or 2 groups of 16
        quants = unpacked.quants.view(len(rows), -1, per_group, GROUP_SIZE // per_group).double()
        of_weight = unpacked.scales.view(len(rows), -1, per_group)
        total = torch.zeros(len(x), len(rows), device=x.device)
        for group in range(num_groups):
            at = first_group + group
            q = values[:, group].double().view(len(x), per_group, -1)  # [T, 1 or 2, 32 or 16]
            for sub in range(per_group):
                sums = (q[:, sub] @ quants[:, at, sub].T).float()
                total += sums * (of_weight[:, at, sub] * scales[:, group])
                if unpacked.offsets is not None:
                    offsets = unpacked.offsets.view(len(rows), -1, per_group)[:, at, sub]
                    total -= offsets * (q[:, sub].sum(-1, keepdim=True).float() * scales[:, group])
        totals.append(total)
    result = torch.cat(totals, dim=1)
    return result if bias is None else result + bias.float()
