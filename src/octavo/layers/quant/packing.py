"""Converts a layer's weight to the kernels' layout; also weights in formats that the kernels do not support.

Those stay compressed in memory and are dequantized whenever the layer is computed: slow, but correct with any kernels,
with the bits of a dense model of the same weights. Floats of 8 bits become dense at once: twice the memory in bfloat16,
and the speed of a dense model.

Legend: N = outputs, K = inputs.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from octavo.errors import CheckpointError
from octavo.kernels.blocks import BlockFormat, BlockWeight, stack_blocks
from octavo.kernels.quantization import Float8Format, QuantizedWeight, Weight, WeightFormat
from octavo.kernels.reference import Kernels
from octavo.kernels.types import LinearRole, PackedLinear
from octavo.layers.quant.base import WeightScheme

logger = logging.getLogger(__name__)

_PARTS = ("values", "scales", "offsets", "multipliers", "order")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedLinear:
    """A low-bit weight, dequantized for each use. 4-bit `values` are packed in pairs: [N, ceil(K / 2)] uint8."""

    weight: QuantizedWeight
    bias: torch.Tensor | None  # [N]
    in_size: int  # J, the columns: K, or more with padding

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> "CompressedLinear":
        values = paired(weight.values) if weight.format.bits == 4 else weight.values
        return cls(weight=replace(weight, values=values.contiguous()), bias=bias, in_size=weight.values.shape[1])

    @classmethod
    def adopt(cls, tensors: Mapping[str, torch.Tensor], in_size: int, form: WeightFormat) -> "CompressedLinear":
        """Restore from the `tensors` of the same weight."""
        assert not isinstance(form, BlockFormat), "blocks are packed, never compressed"
        parts = {name: tensors[name] for name in _PARTS if name in tensors}
        num_columns = len(parts["order"]) if "order" in parts else in_size
        return cls(weight=QuantizedWeight(format=form, **parts), bias=tensors.get("bias"), in_size=num_columns)

    def tensors(self) -> dict[str, torch.Tensor]:
        every = {name: getattr(self.weight, name) for name in _PARTS} | {"bias": self.bias}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def unpacked(self) -> QuantizedWeight:
        if self.weight.format.bits != 4:
            return self.weight
        return replace(self.weight, values=unpaired(self.weight.values, self.in_size))


def paired(values: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit integers [N, K] of -8 ... 7, plus 8: [N, ceil(K / 2)] uint8, the first of two in the low nibble."""
    nibbles = torch.nn.functional.pad(values + 8, (0, values.shape[1] % 2)).view(torch.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def unpaired(pairs: torch.Tensor, in_size: int) -> torch.Tensor:
    """Return the integers [N, K] int8 of what `paired` returned."""
    wide = pairs.to(torch.int16)
    nibbles = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F)  # one in each byte
    return nibbles.view(torch.int8).sub_(8)[:, :in_size]


def stack(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Weight:
    """Stack the weights of one layer's parts, as a copy; dense ones in `dtype`."""
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    if blocks:
        return stack_blocks(blocks)
    dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if not dense:
        return _stack_quantized([weight for weight in weights if isinstance(weight, QuantizedWeight)], device)
    sizes = [len(weight) for weight in dense]
    stacked = torch.empty(sum(sizes), dense[0].shape[1], dtype=dtype, device=device)
    for weight, rows in zip(dense, torch.split(stacked, sizes), strict=True):
        rows.copy_(weight)
    return stacked


def _stack_quantized(weights: Sequence[QuantizedWeight], device: torch.device) -> QuantizedWeight:
    first = weights[0]
    orders = [weight.order for weight in weights if weight.order is not None]
    if any(len(orders) != len(weights) or not torch.equal(order, orders[0]) for order in orders):
        raise CheckpointError("parts of one layer group their inputs in different orders")
    offsets = None
    if any(weight.offsets is not None for weight in weights):
        offsets = torch.cat([torch.zeros_like(w.scales) if w.offsets is None else w.offsets for w in weights])
    multipliers = [weight.multipliers for weight in weights if weight.multipliers is not None]
    return QuantizedWeight(
        format=first.format,
        values=torch.cat([weight.values for weight in weights]).to(device),
        scales=torch.cat([weight.scales for weight in weights]).to(device),
        offsets=None if offsets is None else offsets.to(device),
        multipliers=torch.cat(multipliers).to(device) if multipliers else None,
        order=None if first.order is None else first.order.to(device),
    )


def columns_to_select(kernels: Kernels, weight: Weight, scheme: WeightScheme) -> torch.Tensor | None:
    """Return the columns [J] int32 that a layer selects of its inputs for a packed weight; None: all, as they are."""
    if isinstance(weight, QuantizedWeight) and scheme.selects_columns and kernels.computes(weight.format):
        return weight.order
    return None


def pack(
    kernels: Kernels,
    weight: Weight,
    bias: torch.Tensor | None,
    role: LinearRole,
    scheme: WeightScheme,
    dtype: torch.dtype,
) -> PackedLinear | CompressedLinear:
    """Convert weight [N, K] and bias [N] to the layout of these kernels, or compress it; dense ones are in `dtype`."""
    if not isinstance(weight, QuantizedWeight):
        form = weight.format if isinstance(weight, BlockWeight) else scheme.form
        return kernels.pack_linear(weight, bias, role, form)
    if kernels.computes(weight.format) and (weight.order is None or scheme.selects_columns):
        return kernels.pack_linear(weight, bias, role, weight.format)
    if becomes_dense(kernels, weight.format):
        message = "%s: %s has no kernels for 8-bit floats; weights are computed in %s and take its memory"
        _warn_once(message, scheme.name, kernels.name, str(dtype).removeprefix("torch."))
        return kernels.pack_linear(weight.dequantized().to(dtype), bias, role)
    message = (
        "%s: %s has no kernels for such weights; they are dequantized in every step, which is slow "
        "(on a CPU, bfloat16 and float16 have kernels for most)"
    )
    _warn_once(message, scheme.name, kernels.name)
    return CompressedLinear.of(weight, bias)


def becomes_dense(kernels: Kernels, form: WeightFormat | None) -> bool:
    """Return whether `pack` makes quantized weights of this form dense."""
    return isinstance(form, Float8Format) and not kernels.computes(form)


@cache
def _warn_once(message: str, *arguments: str) -> None:
    logger.warning(message, *arguments)
