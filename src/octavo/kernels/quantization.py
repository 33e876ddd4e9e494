"""Low-bit formats of linear weights, and what `quantization=` means.

A weight w is approximated by scale * q, with one scale for each output and group of inputs. q is an 8-bit integer in
-127 ... 127 or a 4-bit one in -8 ... 7; then activations are quantized to int8 too, each row by max|x| / 127. Or q is
an 8-bit float, and activations are not quantized. Embeddings and norms never are. `kernels/reference_quantized.py`
defines the product.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from octavo.errors import InvalidParameterError
from octavo.kernels.blocks import BlockFormat, BlockWeight
from octavo.kernels.rotation import Rotation, rotated

_SCALE_BYTES = 4
TWO_LEVEL_GROUP_SIZE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerFormat:
    """How one weight [N, K] is quantized to integers.

    Two-level: 4-bit integers that encode 8-bit ones. Each output and group of 32 inputs has a multiplier m in
    -127 ... 127, and the 8-bit integer is (q * m + 4) >> 3, in -127 ... 127. So sums are exact over all inputs, which
    floating-point group scales would prevent; a weight takes 4.25 bits.

    How the formats of other programs map to `QuantizedWeight`; d, e, s, m, z are read as float32, n is the stored
    integer:

    - GPTQ and AWQ (after undoing its nibble order), 4 bits, groups of 32, 64 or 128: w = s * (n - z). q = n - 8,
      scale s, offset s * (8 - z).
    - GGUF Q4_0, groups of 32: w = d * (n - 8). q = n - 8, scale d.
    - GGUF Q4_1, groups of 32: w = d * n + m. q = n - 8, scale d, offset m + 8 * d.
    - GGUF Q4_K, groups of 32: w = (d * s) * n - e * t. q = n - 8, scale d * s, offset 8 * d * s - e * t.
    - GGUF Q8_0, groups of 32: w = d * q. 8 bits.
    - GGUF Q6_K, groups of 16: w = (d * s) * (n - 32). 8 bits, groups of 32, in two weights, one with zeros in the odd
      groups of 16 and one with zeros in the even ones; the importer has to add their results.

    The offsets of Q4_1 and Q4_K are sums of two numbers: exact unless these differ so much in magnitude that float32
    cannot hold both. tests/kernels/test_imported_forms.py tests each mapping.
    """

    bits: int  # 8 or 4
    group_size: int | None  # inputs that share a scale: 32, 64 or 128; None: all of them
    is_two_level: bool = False  # only with 4 bits and one scale for all inputs
    rotation: Rotation | None = None  # of the inputs of weights and activations, before quantization

    def rotated(self, x: Tensor) -> Tensor:
        """Return what is quantized of x [..., K], weights or activations: float32, rotated if this form is."""
        return x.float() if self.rotation is None else rotated(x.float(), self.rotation)

    def num_groups(self, in_size: int) -> int:
        """Return G."""
        return 1 if self.group_size is None else -(-in_size // self.group_size)

    def num_multipliers(self, in_size: int) -> int:
        """Return how many multipliers an output has."""
        return -(-in_size // TWO_LEVEL_GROUP_SIZE) if self.is_two_level else 0

    def of_share(self, start: int, stop: int, in_size: int) -> tuple["IntegerFormat", Tensor]:
        """Return the form of the slice start ... stop - 1 of the K inputs, and which group each of its groups was in.

        If the slice begins or ends inside a group, groups become smaller, so that none is split.
        """
        size, groups = _groups_of_share(self.group_size, start, stop, in_size)
        return replace(self, group_size=size), groups

    def num_bytes(self, num_outputs: int, in_size: int) -> int:
        """Return what a weight [N, K] takes with its scales."""
        of_output = in_size * self.bits // 8 + self.num_multipliers(in_size) + self.num_groups(in_size) * _SCALE_BYTES
        return num_outputs * of_output


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Format:
    """How one weight [N, K] is quantized to 8-bit floats, e4m3 (Micikevicius et al. 2022, arXiv:2209.05433)."""

    bits: ClassVar[int] = 8
    group_size: int | None = None  # inputs that share a scale; None: all of them
    is_two_level: ClassVar[bool] = False

    def num_groups(self, in_size: int) -> int:
        """Return G."""
        return 1 if self.group_size is None else -(-in_size // self.group_size)

    def of_share(self, start: int, stop: int, in_size: int) -> tuple["Float8Format", Tensor]:
        """See `IntegerFormat.of_share`."""
        size, groups = _groups_of_share(self.group_size, start, stop, in_size)
        return Float8Format(group_size=size), groups

    def num_bytes(self, num_outputs: int, in_size: int) -> int:
        """Return what a weight [N, K] takes with its scales."""
        return num_outputs * (in_size + _SCALE_BYTES * self.num_groups(in_size))


PlainFormat = IntegerFormat | Float8Format
WeightFormat = PlainFormat | BlockFormat  # of a linear layer's weight, unless that is dense


def _groups_of_share(group_size: int | None, start: int, stop: int, in_size: int) -> tuple[int | None, Tensor]:
    if group_size is None:
        return None, torch.zeros(1, dtype=torch.int64)
    size = math.gcd(group_size, start, 0 if stop == in_size else stop)
    return size, torch.arange(start, stop, size) // group_size


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
        if isinstance(self.format, IntegerFormat):
            weight = self.format.rotated(weight)  # the rotation is its own inverse
        if self.order is None:
            return weight
        used = self.order >= 0
        return weight[:, used][:, self.order[used].argsort()]


LowBitWeight = QuantizedWeight | BlockWeight


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
    """Return the quantization called `name`.

    Raises:
        InvalidParameterError: there is none.
    """
    if name not in QUANTIZATIONS:
        raise InvalidParameterError("quantization", name, "one of " + ", ".join(QUANTIZATIONS))
    return QUANTIZATIONS[name]
