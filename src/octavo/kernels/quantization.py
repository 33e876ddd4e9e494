"""Low-bit formats of linear weights, and what `quantization=` means.

A weight w is approximated by scale * q, with one scale for each output and group of inputs. q is an 8-bit integer in
-127 ... 127 or a 4-bit one in -8 ... 7; then activations are quantized to int8 too, each row by max|x| / 127. Or q is
an 8-bit float, and activations are not quantized. Embeddings and norms never are. `kernels/quantize.py` defines how
weights are quantized, and the product.

Rows of activations have outliers. With one scale per row, everything else would be rounded away. An orthogonal matrix R
spreads each outlier over other inputs and leaves the product unchanged: (x R) (W R)^T = x W^T (QuaRot: Ashkboos et al.
2024, arXiv:2404.00456). Every element is a series of sums and differences in a fixed order, so all kernels get the same
bits.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, Self

import torch
from torch import Tensor

from octavo.errors import InvalidParameterError
from octavo.kernels.blocks import BlockFormat, BlockWeight

_SCALE_BYTES = 4
GROUP_SIZES = (None, 32, 64, 128)  # that kernels compute with
TWO_LEVEL_GROUP_SIZE = 32
ROTATION_BLOCK = 64  # inputs
Rotation = Literal["blocks", "row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedFormat:
    """How one weight [N, K] is quantized, with a scale for each output and group of inputs."""

    bits: int  # 8 or 4
    group_size: int | None  # inputs that share a scale; None: all of them
    is_two_level: bool = False  # only with 4 bits and one scale for all inputs
    rotation: Rotation | None = None  # of the inputs of weights and activations, before they become integers

    def rotated(self, x: Tensor) -> Tensor:
        """Return what is quantized of x [..., K], weights or activations: float32, rotated if this form is."""
        return x.float() if self.rotation is None else rotated(x.float(), self.rotation)

    def num_groups(self, in_size: int) -> int:
        """Return G."""
        return 1 if self.group_size is None else -(-in_size // self.group_size)

    def num_multipliers(self, in_size: int) -> int:
        """Return how many multipliers an output has."""
        return -(-in_size // TWO_LEVEL_GROUP_SIZE) if self.is_two_level else 0

    def of_share(self, start: int, stop: int, in_size: int) -> tuple[Self, Tensor]:
        """Return the form of the slice start ... stop - 1 of the K inputs, and which group each of its groups was in.

        If the slice begins or ends inside a group, groups become smaller, so that none is split.
        """
        if self.group_size is None:
            return self, torch.zeros(1, dtype=torch.int64)
        size = math.gcd(self.group_size, start, 0 if stop == in_size else stop)
        return replace(self, group_size=size), torch.arange(start, stop, size) // self.group_size

    def num_bytes(self, num_outputs: int, in_size: int) -> int:
        """Return what a weight [N, K] takes with its scales."""
        of_output = in_size * self.bits // 8 + self.num_multipliers(in_size) + self.num_groups(in_size) * _SCALE_BYTES
        return num_outputs * of_output


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerFormat(GroupedFormat):
    """Quantized to integers.

    Two-level: 4-bit integers that encode 8-bit ones. Each output and group of 32 inputs has a multiplier m in
    -127 ... 127, and the 8-bit integer is (q * m + 4) >> 3, in -127 ... 127. So sums are exact over all inputs, which
    floating-point group scales would prevent; a weight takes 4.25 bits. How weights of GPTQ, AWQ and GGUF files map to
    this format, with offsets: tests/kernels/test_imported_forms.py.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Format(GroupedFormat):
    """Quantized to 8-bit floats, e4m3 (Micikevicius et al. 2022, arXiv:2209.05433)."""

    bits: int = 8
    group_size: int | None = None


PlainFormat = IntegerFormat | Float8Format
WeightFormat = PlainFormat | BlockFormat  # of a linear layer's weight, unless that is dense


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """A low-bit weight in the plain layout: w = scale * q + offset, or its rotation.

    `order` is for files whose groups are not contiguous: column j of the other tensors belongs to input order[j], or is
    padding, where that is -1: in a rank's shard of the inputs, groups differ in size.
    """

    format: PlainFormat
    values: Tensor  # [N, J], q: int8, or float8_e4m3fn; J = K, or more with padding
    scales: Tensor  # [N, G] float32
    offsets: Tensor | None = None  # [N, G] float32; None: zeros
    multipliers: Tensor | None = None  # [N, ceil(K / 32)] int8, of two-level integers
    order: Tensor | None = None  # [J] int32; None: groups are contiguous, J = K

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def integers(self) -> Tensor:
        """Return [N, K], int8 or float8_e4m3fn: what activations are multiplied by."""
        if self.multipliers is None:
            return self.values
        wide = self.multipliers.repeat_interleave(TWO_LEVEL_GROUP_SIZE, dim=1)[:, : self.values.shape[1]].int()
        return ((self.values * wide + 4) >> 3).to(torch.int8)

    def dequantized(self) -> Tensor:
        """Return the weight [N, K] in float32."""
        in_size = self.values.shape[1]
        group_size = self.format.group_size or in_size
        scales = self.scales.repeat_interleave(group_size, dim=1)[:, :in_size]  # [N, K]
        weight = scales * self.integers().float()
        if self.offsets is not None:
            weight += self.offsets.repeat_interleave(group_size, dim=1)[:, :in_size]
        weight = self.format.rotated(weight)  # the rotation is its own inverse
        if self.order is None:
            return weight
        used = self.order >= 0
        return weight[:, used][:, self.order[used].argsort()]


LowBitWeight = QuantizedWeight | BlockWeight
Weight = Tensor | LowBitWeight  # [N, K], dense or low-bit


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """The formats of a whole model."""

    name: str
    linear: PlainFormat  # of all linear layers but one
    logits: PlainFormat  # of the logits head


# With one scale per row, blocks are mixed as far as possible; with multipliers of 32 inputs, that is not needed.
_INT8 = IntegerFormat(bits=8, group_size=None, rotation="row")
# Two-level: compared with float scales for groups of 128, half the divergence from bfloat16 (0.0003 nats, not 0.0005),
# and from 8 rows on a third faster, as sums are not interrupted. The price: with one scale over all inputs, ranks that
# shard the inputs of a linear quantize to different integers, as they do with 8 bits.
_INT4 = IntegerFormat(bits=4, group_size=None, is_two_level=True, rotation="blocks")
_FLOAT8 = Float8Format()
QUANTIZATIONS = MappingProxyType(
    {
        "int8": Quantization(name="int8", linear=_INT8, logits=_INT8),
        "int4": Quantization(name="int4", linear=_INT4, logits=_INT4),
        "fp8": Quantization(name="fp8", linear=_FLOAT8, logits=_FLOAT8),
    }
)


def get_quantization(name: str) -> Quantization:
    """Return the quantization called `name`, or raise an `InvalidParameterError`."""
    if name not in QUANTIZATIONS:
        raise InvalidParameterError("quantization", name, "one of " + ", ".join(QUANTIZATIONS))
    return QUANTIZATIONS[name]


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Multiply x [..., K] float32 by an orthogonal matrix that mixes each whole block of 64; the rest is unchanged.

    With "row", blocks are then mixed with each other, as far as their number has factors of 2 and 3. It is a fast
    Walsh-Hadamard transform, in steps of 1, 2, 4, ...; then, for each factor of 3, the reflection that subtracts two
    thirds of the sum of three blocks from each. The matrix is its own inverse.
    """
    size = x.shape[-1] // ROTATION_BLOCK * ROTATION_BLOCK
    mixed, rest = x[..., :size], x[..., size:]
    step = 1
    while step < ROTATION_BLOCK:
        mixed, step = sums_and_differences(mixed, step), step * 2
    mixed = mixed / ROTATION_BLOCK**0.5
    if rotation == "row" and size > 0:
        mixed = _mix_blocks(mixed)
    return torch.cat((mixed, rest), dim=-1)


def mixing_scale(size: int) -> float:
    """Return the factor that preserves the norm of a row of `size` inputs when its blocks are mixed."""
    num_blocks = max(1, size // ROTATION_BLOCK)
    powers, threes = num_blocks & -num_blocks, 1
    while num_blocks // powers // threes % 3 == 0:
        threes *= 3
    return 1.0 / (math.sqrt(powers) * threes)


def _mix_blocks(x: Tensor) -> Tensor:
    """Mix all blocks of x [..., K], K a multiple of 64."""
    size, step = x.shape[-1], ROTATION_BLOCK
    mixed = x
    while size // step % 2 == 0:
        mixed, step = sums_and_differences(mixed, step), step * 2
    while size // step % 3 == 0:
        thirds = mixed.reshape(*x.shape[:-1], -1, 3, step).unbind(-2)  # [..., K / (3 * step), step] each
        twice = thirds[0] + thirds[1] + thirds[2]
        twice = twice + twice
        mixed, step = torch.stack([twice - (of + of + of) for of in thirds], dim=-2).flatten(-3), step * 3
    return mixed * mixing_scale(size)


def sums_and_differences(x: Tensor, step: int) -> Tensor:
    """Replace x[..., k] and x[..., k + step], for each k without that bit, by their sum and difference."""
    first, second = x.reshape(*x.shape[:-1], -1, 2, step).unbind(-2)  # [..., K / (2 * step), step] each
    return torch.stack((first + second, first - second), dim=-2).flatten(-3)
