"""How the C++ kernels pack weights, one entry for each kind: dense, integers, blocks of GGUF files. Ops are the same.

Integers and blocks are multiplied by 16-bit activations that the ops quantize. Sums over the inputs of a group are
exact, and groups are added in a fixed order: a row's bits depend on that row alone. `kernels/quantize.py` and
`kernels/blocks.py` define the products; layouts: panels.inc.h, integer_pack.inc.h and blocks.h of `kernels/cpu/`.

Legend: N = outputs, K = inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.kernels.blocks import BlockFormat, BlockWeight
from octavo.kernels.large_pages import SharedPages
from octavo.kernels.quantization import IntegerFormat, QuantizedWeight, Weight, WeightFormat
from octavo.kernels.types import LinearRole, PackedLinear

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu

NO_ADDRESS = 0
_STRIP = 16  # outputs: a part that others follow consists of whole strips
_MAX_PARTS = 4  # of a weight in blocks


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A weight [N, K] to be packed."""

    num_outputs: int  # N
    in_size: int  # K
    role: LinearRole
    form: WeightFormat | None

    @property
    def is_gated(self) -> bool:
        return self.role == "gated"

    @property
    def out_size(self) -> int:
        """The outputs of the linear with its activation."""
        return self.num_outputs // (1 + self.is_gated)

    def first(self, count: int) -> "LinearSpec":
        """Return the spec of the first `count` outputs, whole panels: a prefix of the same packed tensors."""
        assert not self.is_gated, "gates and ups are side by side"
        form = self.form.joined().first(count) if isinstance(self.form, BlockFormat) else self.form
        return replace(self, num_outputs=count, form=form)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLinear(PackedLinear):
    """A packed linear and its C++ handle: sizes, and the addresses of its tensors. `weight` is bytes if not dense."""

    handle: "_cpu.PackedWeight"
    form: type[WeightFormat] | type[None]  # its kind
    spec: LinearSpec
    scales: Tensor | None = None  # [1 or 2, ...] float32, of integers: scales, and offsets if there are any


class WeightKind(ABC):
    """One kind of weights."""

    form: ClassVar[type[WeightFormat] | type[None]]

    def __init__(self, native: "_cpu.Kernels", dtype: torch.dtype) -> None:
        from octavo.kernels.cpu import _cpu

        self.cpu, self.native, self.dtype, self._pages = _cpu, native, dtype, SharedPages()

    def pack(self, weight: Weight, bias: Tensor | None, spec: LinearSpec) -> NativeLinear:
        """Convert weight [N, K] and bias [N] to the layout that all linear ops read."""
        tensors = self.fill(weight, spec)
        return self.bind(tensors if bias is None else {**tensors, "bias": _pack_bias(bias, spec)}, spec)

    def bind(self, tensors: Mapping[str, Tensor], spec: LinearSpec) -> NativeLinear:
        """Return the linear made of packed tensors."""
        return NativeLinear(
            weight=tensors["weight"],
            bias=tensors.get("bias"),
            scales=tensors.get("scales"),
            num_outputs=spec.num_outputs,
            form=self.form,
            spec=spec,
            handle=self.handle(tensors, spec),
        )

    @abstractmethod
    def fill(self, weight: Weight, spec: LinearSpec) -> dict[str, Tensor]:
        """Convert a weight [N, K]; return the packed tensors."""

    @abstractmethod
    def handle(self, tensors: Mapping[str, Tensor], spec: LinearSpec) -> Any:
        """Return the C++ handle of packed tensors, a `_cpu.PackedWeight`."""


class DenseWeights(WeightKind):
    """In the kernels' dtype."""

    form = NoneType

    def fill(self, weight: Weight, spec: LinearSpec) -> dict[str, Tensor]:
        assert isinstance(weight, Tensor), "low-bit weights have a form"
        weight, sizes = weight.contiguous(), (spec.in_size, spec.out_size, spec.is_gated)
        packed = self._pages.zeros(self.cpu.packed_size(*sizes), self.dtype)
        self.native.pack_linear(weight.data_ptr(), *sizes, packed.data_ptr())
        return {"weight": packed}

    def handle(self, tensors: Mapping[str, Tensor], spec: LinearSpec) -> Any:
        return self.cpu.PackedWeight(spec.out_size, tensors["weight"].data_ptr(), address(tensors.get("bias")))


class IntegerWeights(WeightKind):
    """Of 8 or 4 bits, with scales in a tensor of their own."""

    form = IntegerFormat

    def fill(self, weight: Weight, spec: LinearSpec) -> dict[str, Tensor]:
        assert not isinstance(weight, BlockWeight), "blocks are never converted to another form"
        integers = self.describe(spec)
        packed = self._pages.zeros(integers.packed_size, torch.uint8)
        has_offsets = isinstance(weight, QuantizedWeight) and weight.offsets is not None
        scales = torch.empty(1 + has_offsets, integers.scales_size)  # and offsets, in the order of the panels' outputs
        addresses = packed.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr() if has_offsets else NO_ADDRESS
        if isinstance(weight, Tensor):
            weight = weight.contiguous()
            self.native.pack_weight(integers, weight.data_ptr(), *addresses[:2])
        else:
            parts = weight.values, weight.scales, weight.offsets, weight.multipliers
            plain = [None if part is None else part.contiguous() for part in parts]
            every_address = *map(address, plain), *addresses
            self.native.pack_integers(integers, *every_address)
        return {"weight": packed, "scales": scales}

    def handle(self, tensors: Mapping[str, Tensor], spec: LinearSpec) -> Any:
        weight, scales = tensors["weight"], tensors["scales"]
        offsets = scales[1].data_ptr() if len(scales) > 1 else NO_ADDRESS
        addresses = weight.data_ptr(), scales[0].data_ptr(), offsets, address(tensors.get("bias"))
        return self.cpu.PackedWeight.of_integers(self.describe(spec), *addresses)

    def describe(self, spec: LinearSpec) -> Any:
        form = spec.form
        assert isinstance(form, IntegerFormat)
        return self.cpu.Integers(
            bits=form.bits,
            group_size=form.group_size or 0,
            is_two_level=form.is_two_level,
            is_rotated=form.rotation is not None,
            mixes_blocks=form.rotation == "row",
            in_size=spec.in_size,
            out_size=spec.out_size,
            is_gated=spec.is_gated,
            is_logits_head=spec.role == "logits",
        )


class BlockWeights(WeightKind):
    """In the blocks of a GGUF file, repacked."""

    form = BlockFormat

    def fill(self, weight: Weight, spec: LinearSpec) -> dict[str, Tensor]:
        assert isinstance(weight, BlockWeight), "nothing is quantized to blocks"
        sizes = weight.format.sizes
        is_in_strips = len(sizes) <= _MAX_PARTS and not any(size % _STRIP for size in sizes[:-1])
        if not spec.is_gated and not is_in_strips:  # else the bytes are the same, without a copy
            weight = weight.joined()
        blocks = self._describe(weight.format, spec)
        packed = self._pages.zeros(blocks.packed_size, torch.uint8)
        parts = [rows.contiguous() for rows in weight.parts]
        self.native.pack_blocks(blocks, [rows.data_ptr() for rows in parts], packed.data_ptr())
        return {"weight": packed}

    def handle(self, tensors: Mapping[str, Tensor], spec: LinearSpec) -> Any:
        addresses = tensors["weight"].data_ptr(), address(tensors.get("bias"))
        return self.cpu.PackedWeight.of_blocks(self.describe(spec), *addresses)

    def describe(self, spec: LinearSpec) -> Any:
        assert isinstance(spec.form, BlockFormat)
        return self._describe(spec.form if spec.is_gated else spec.form.joined(), spec)

    def _describe(self, form: BlockFormat, spec: LinearSpec) -> Any:
        if not spec.is_gated and any(size % _STRIP for size in form.sizes[:-1]):
            found = ", ".join(f"{name} [{size}]" for name, size in zip(form.types, form.sizes, strict=True))
            limit = f"with a multiple of {_STRIP} outputs each; quantization='dequantize' has no such limit"
            raise UnsupportedModelError(f"parts of a layer have different types ({found}); supported: {limit}")
        return self.cpu.Blocks(
            types=form.numbers,
            sizes=list(form.sizes),
            is_gated=spec.is_gated,
            row_inputs=form.row_inputs,
            first_input=form.first_input,
            in_size=spec.in_size,
            span=form.span(spec.in_size),
        )


def make_weight_kinds(native: "_cpu.Kernels", dtype: torch.dtype) -> dict[type, WeightKind]:
    """Return the kinds that kernels of a dtype compute with, by the type of their form."""
    kinds = (DenseWeights,) if dtype == torch.float32 else (DenseWeights, IntegerWeights, BlockWeights)
    return {kind.form: kind(native, dtype) for kind in kinds}


def native_dtype(dtype: torch.dtype) -> "_cpu.DType":
    """Return the kernels' name of a dtype that they compute with."""
    from octavo.kernels.cpu import _cpu

    names = {torch.bfloat16: _cpu.DType.BFLOAT16, torch.float16: _cpu.DType.FLOAT16, torch.float32: _cpu.DType.FLOAT32}
    return names[dtype]


def address(tensor: Tensor | None) -> int:
    """Return a tensor's address, or that of nothing."""
    return NO_ADDRESS if tensor is None else tensor.data_ptr()


def _pack_bias(bias: Tensor, spec: LinearSpec) -> Tensor:
    """Lay a bias [N] out in the order of the panels' outputs, 32 each: float32, padded with zeros."""
    parts = bias.float().view(1 + spec.is_gated, -1)  # [1 or 2, N or I]
    width = 32 // len(parts)
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[1] % width))
    return padded.view(len(parts), -1, width).transpose(0, 1).contiguous().view(-1)
