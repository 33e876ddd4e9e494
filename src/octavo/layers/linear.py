"""Linear layers. Those that read the same input are merged: one matmul instead of two or three.

Under tensor parallelism each rank holds a shard of the outputs (column parallel) or of the inputs (row parallel); the
partial sums of the latter are all-reduced. A column-parallel linear followed by a row-parallel one needs no other
communication.

Adapters (LoRA) add to a linear's rounded output, for the tokens that have one: `adapter_ids` [T] int64 are their slots,
-1: none; None: no token has an adapter. They are sharded like their linear, so partial sums contain partial additions.

Legend: T = tokens, K = inputs of this rank, N = outputs of this rank, D = all outputs.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from octavo.distributed.groups import Group, HeadShare, Share, SingleRank
from octavo.errors import UnsupportedModelError
from octavo.kernels.blocks import BlockWeight
from octavo.kernels.quantization import Weight, WeightFormat
from octavo.kernels.reference import LoraAdapters
from octavo.kernels.types import SILU, Activation, LinearRole, PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.norm import NoNorm, RMSNorm
from octavo.layers.quant.base import DENSE, TensorSpec
from octavo.layers.quant.gguf import BlockScheme
from octavo.layers.quant.packing import CompressedLinear, becomes_dense, columns_to_select, pack, stack
from octavo.layers.weight_owner import WeightOwner


class MergedLinear(WeightOwner):
    """Several linear layers of one input, stacked by output rows. `parts` gives the name and outputs of each, in order.

    A part with the empty name is loaded from "weight" and "bias", a part "q" from "q.weight" and "q.bias"; quantized
    weights, from the tensors of their scheme.
    """

    role: ClassVar[LinearRole] = "plain"
    stored_parts: tuple[str, ...] = ()  # the parts that a checkpoint names, if not `parts`

    def __init__(self, inputs: Share, parts: Mapping[str, Share], *, has_bias: bool, context: BuildContext) -> None:
        super().__init__()
        self.inputs, self.parts, self._has_bias, self._context = inputs, dict(parts), has_bias, context
        self._sizes = [outputs.size for outputs in parts.values()]
        self.scheme = context.scheme(self.stored_parts or parts, self.role)
        self.adapters: LoraAdapters | None = None  # of this rank's shard, if the model serves any
        self._loaded: dict[str, torch.Tensor] = {}  # until packed
        self._packed: PackedLinear | CompressedLinear | None = None
        self._columns: torch.Tensor | None = None  # [J] int32: of the inputs, as the packed weight has them, if not all

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        tensors: dict[str, TensorSpec] = {}
        for index, (part, outputs) in enumerate(self.parts.items()):
            of_weight = self.scheme.part(index).tensors(outputs.total, self.inputs.total)
            tensors.update({_join(part, name): spec for name, spec in of_weight.items()})
            if self._has_bias:
                tensors[_join(part, "bias")] = TensorSpec((outputs.total,))
        return tensors

    @property
    def num_weights(self) -> int:
        return sum(self._sizes) * (self.inputs.size + self._has_bias)

    @property
    def num_bytes(self) -> int:
        dtype = self._context.dtype
        scheme = DENSE if becomes_dense(self._context.kernels, self._stored_form) else self.scheme
        bias = sum(self._sizes) * dtype.itemsize * self._has_bias
        return scheme.merged_bytes(self._sizes, self.inputs.size, dtype) + bias

    @property
    def layout(self) -> str:
        return repr(self.scheme)

    @property
    def _stored_form(self) -> WeightFormat | None:
        """The format of this rank's shard in the checkpoint."""
        return self.scheme.packed_form(self._sizes, self.inputs)

    @property
    def is_compressed(self) -> bool:
        """Whether kernels cannot use the weight as it is stored: `packed` is computed on each access."""
        return isinstance(self._packed, CompressedLinear)

    @property
    def is_recordable(self) -> bool:
        """Whether this layer consists of native calls only."""
        return not self.is_compressed

    @property
    def packed(self) -> PackedLinear:
        assert self._packed is not None, "process_weights_after_loading has not run"
        if isinstance(self._packed, CompressedLinear):
            dense = self._packed.unpacked().dequantized().to(self._context.dtype)
            return self._context.kernels.pack_linear(dense, self._packed.bias, self.role)
        return self._packed

    def num_stored_rows(self, name: str) -> int:
        """Return the rows that a checkpoint's tensor `name` has on all ranks."""
        return self.parts[name].total

    def split_rows(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows of each part that a checkpoint's tensor `name` [N, ...] holds."""
        return {name: rows}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        # Kept as loaded, usually a view of a mapped file, so that one layer at a time is copied and converted; and only
        # this rank's shard of it is ever read.
        self._loaded[name] = tensor

    def process_weights_after_loading(self) -> None:
        if self._packed is None:
            self._pack(self._gather_weight(self._loaded), self._gather_bias(self._loaded))
            self._loaded.clear()

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight, bias = self._gather_weight(tensors), self._gather_bias(tensors)
        if isinstance(weight, BlockWeight):
            why = "weights in blocks cannot be saved as shards; convert a GGUF file to safetensors first"
            raise UnsupportedModelError(f"{self.scheme.name}: {why}")
        if not isinstance(weight, torch.Tensor):
            return CompressedLinear.of(weight, bias).tensors()
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def adopt_shard(self, tensors: Mapping[str, torch.Tensor]) -> None:
        context, form, bias = self._context, self._stored_form, tensors.get("bias")
        if "weight" in tensors or form is None:
            weight: Weight = tensors["weight"]
        else:
            weight = CompressedLinear.adopt(tensors, self.inputs.size, form).unpacked()
        assert not isinstance(weight, BlockWeight), "blocks are never saved as shards"
        expected = sum(self._sizes), len(tensors["order"]) if "order" in tensors else self.inputs.size
        found = tuple((weight if isinstance(weight, torch.Tensor) else weight.values).shape)
        if found != expected:
            raise ValueError(f"shape {list(expected)} is expected, found {list(found)}")
        if bias is not None:
            bias = bias.to(context.device, context.dtype)
        self._pack(stack([weight], context.dtype, context.device), bias)

    def _pack(self, weight: Weight, bias: torch.Tensor | None) -> None:
        kernels, dtype = self._context.kernels, self._context.dtype
        self._packed = pack(kernels, weight, bias, self.role, self.scheme, dtype)
        self._columns = columns_to_select(kernels, weight, self.scheme)

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        if isinstance(self._packed, CompressedLinear):
            return self._packed.tensors()
        if self._context.kernels.layout is None:
            return None
        columns = {} if self._columns is None else {"columns": self._columns}
        return self.packed.packed_tensors() | columns

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kernels = self._context.kernels
        form = None if becomes_dense(kernels, self._stored_form) else self._stored_form
        if "values" in tensors and form is not None:
            self._packed = CompressedLinear.adopt(tensors, self.inputs.size, form)
        else:
            self._columns = tensors.get("columns")
            in_size = self.inputs.size if self._columns is None else len(self._columns)
            self._packed = kernels.adopt_linear(tensors, (sum(self._sizes), in_size), self.role, form)

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Apply to x [T, K]: [T, N], the parts concatenated in order."""
        if adapter_ids is None or self.adapters is None:
            return self._context.kernels.linear(self.selected(x), self.packed)
        return self._adapted(x, adapter_ids)

    def of_normed(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        adapter_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, K] to the residual stream [T, K]; return (the linear of the normalized sum [T, N], the sum)."""
        if isinstance(norm, NoNorm) or self.stands_alone(adapter_ids):
            normed, total = norm.add(x, residual)  # the same bits
            return MergedLinear.forward(self, normed, adapter_ids), total
        return self._context.kernels.normed_linear(x, norm.fused(residual), self.packed)

    def stands_alone(self, adapter_ids: torch.Tensor | None) -> bool:
        """Whether a step cannot fuse it with its neighbors: an adapter may add to it, or it selects columns."""
        return self._columns is not None or (adapter_ids is not None and self.adapters is not None)

    def selected(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs [T, J] in the order of the packed weight's columns, of x [T, K]."""
        return x if self._columns is None else self._context.kernels.select_columns(x, self._columns)

    def _adapted(self, x: torch.Tensor, adapter_ids: torch.Tensor, *, is_gated: bool = False) -> torch.Tensor:
        kernels = self._context.kernels
        assert self.adapters is not None
        linear = kernels.gated_linear if is_gated else kernels.linear
        return kernels.add_lora(linear(self.selected(x), self.packed), x, self.adapters, adapter_ids)

    def _gather_weight(self, loaded: Mapping[str, torch.Tensor]) -> Weight:
        """Stack this rank's shards of the parts: [N, K]."""
        weights = []
        for index, (part, outputs) in enumerate(self.parts.items()):
            scheme = self.scheme.part(index)
            names = scheme.tensors(outputs.total, self.inputs.total)
            tensors = {name: loaded[_join(part, name)] for name in names if _join(part, name) in loaded}
            weights.append(scheme.weight(tensors, outputs, self.inputs))
        return stack(weights, self._context.dtype, self._context.device)

    def _gather_bias(self, loaded: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Stack the biases of the parts: [N], copied, in the context's dtype; None if this rank adds none."""
        if not self._has_bias or self.inputs.start != 0:  # added once: by the rank with the first part of the sum
            return None
        biases = [loaded[_join(part, "bias")][outputs.start : outputs.stop] for part, outputs in self.parts.items()]
        return torch.cat([bias.to(self._context.device, self._context.dtype) for bias in biases])


class RegroupedLinear(MergedLinear):
    """Some parts are stored together: rows of one tensor, each part's all at once, or head by head.

    `stored` gives the parts of each tensor, by its name; `num_groups`, in how many groups its rows are: each has rows
    of every part in turn.
    """

    def __init__(
        self,
        inputs: Share,
        parts: Mapping[str, Share],
        *,
        stored: Mapping[str, tuple[str, ...]],
        num_groups: int,
        has_bias: bool,
        context: BuildContext,
    ) -> None:
        self._stored, self._num_groups, self.stored_parts = dict(stored), num_groups, tuple(stored)
        super().__init__(inputs, parts, has_bias=has_bias, context=context)
        self._stored_scheme = self.scheme
        if isinstance(self.scheme, BlockScheme):  # each part has the type of the tensor that it is stored in
            places = {part: place for place, of in enumerate(stored.values()) for part in of}
            self.scheme = self.scheme.spread([places[part] for part in parts])
        if self.scheme.part(0).tensors(1, inputs.total).keys() != {"weight"}:
            what = f"{context.name_of(self.stored_parts[0])} is {self.scheme.name}"
            raise UnsupportedModelError(f"{what}; its rows are put in another order, so it must be one tensor")

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        tensors: dict[str, TensorSpec] = {}
        for place, (name, parts) in enumerate(self._stored.items()):
            total = sum(self.parts[part].total for part in parts)
            of_weight = self._stored_scheme.part(place).tensors(total, self.inputs.total)
            tensors.update({_join(name, parameter): spec for parameter, spec in of_weight.items()})
            if self._has_bias:
                tensors[_join(name, "bias")] = TensorSpec((total,))
        return tensors

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        stored, _, parameter = name.rpartition(".")
        for part, rows in self.split_rows(stored, tensor).items():
            super().load_weight(_join(part, parameter), rows)

    def num_stored_rows(self, name: str) -> int:
        return sum(self.parts[part].total for part in self._stored[name])

    def split_rows(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self._stored[name]
        if len(parts) == 1:
            return {parts[0]: rows}
        grouped = rows.view(self._num_groups, -1, *rows.shape[1:])
        sizes = [self.parts[part].total // self._num_groups for part in parts]
        split = grouped.split_with_sizes(sizes, dim=1)
        return {part: of.flatten(0, 1) for part, of in zip(parts, split, strict=True)}

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            self.load_weight(name, tensor)
        loaded, self._loaded = self._loaded, {}
        return super().shard_of(loaded)


def one_tensor_linear(
    inputs: Share, parts: Mapping[str, Share], *, has_bias: bool, context: BuildContext
) -> MergedLinear:
    """Return a linear of several parts that checkpoints have as one tensor, one part after the other.

    Only where ranks have a part of each, rows are put in another order: see `RegroupedLinear`.
    """
    if all(part.is_whole for part in parts.values()):
        whole = {"": Share.whole(sum(part.total for part in parts.values()))}
        return MergedLinear(inputs, whole, has_bias=has_bias, context=context)
    stored = {"": tuple(parts)}
    return RegroupedLinear(inputs, parts, stored=stored, num_groups=1, has_bias=has_bias, context=context)


class QKVLinear(MergedLinear):
    """The projections to queries, keys and values, for this rank's heads; `projects`: or to the first of these only.

    With a gate, also to one for each element of the queries' heads.
    """

    def __init__(
        self,
        in_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        has_bias: bool,
        context: BuildContext,
        projects: str = "qkv",
        has_gate: bool = False,
    ) -> None:
        group = context.groups.tensor
        heads = HeadShare.of(num_heads, num_kv_heads, group.rank, group.size)
        kv = heads.kv.times(head_dim)
        query = heads.query.times(head_dim)
        parts = {part: query if part == "q" else kv for part in projects} | ({"gate": query} if has_gate else {})
        super().__init__(Share.whole(in_size), parts, has_bias=has_bias, context=context)
        self.heads = heads


class GatedQKVLinear(RegroupedLinear):
    """The same, and to a gate for each element of the queries' heads; checkpoints hold each head's query and gate."""

    def __init__(
        self, in_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, has_bias: bool, context: BuildContext
    ) -> None:
        group = context.groups.tensor
        heads = HeadShare.of(num_heads, num_kv_heads, group.rank, group.size)
        query, kv = heads.query.times(head_dim), heads.kv.times(head_dim)
        parts = {"q": query, "k": kv, "v": kv, "gate": query}
        stored = {"q": ("q", "gate"), "k": ("k",), "v": ("v",)}
        inputs = Share.whole(in_size)
        super().__init__(inputs, parts, stored=stored, num_groups=num_heads, has_bias=has_bias, context=context)
        self.heads = heads


class Linear(MergedLinear):
    """One linear layer, from a shard of the inputs to all outputs: every rank returns the all-reduced sum."""

    def __init__(self, inputs: Share, out_size: int, *, has_bias: bool, context: BuildContext) -> None:
        super().__init__(inputs, {"": Share.whole(out_size)}, has_bias=has_bias, context=context)
        self._group: Group = SingleRank() if inputs.is_whole else context.groups.tensor

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Apply to x [T, K]: [T, D]."""
        return self.summed(super().forward(x, adapter_ids))

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """All-reduce the ranks' partial sums [T, D]; for ops that fuse this linear with others."""
        return self._group.all_reduce(part)


class GatedLinear(MergedLinear):
    """The first half of a gated MLP: by default silu(gate(x)) * up(x)."""

    role = "gated"

    def __init__(
        self, in_size: int, out_size: int, *, has_bias: bool, context: BuildContext, activation: Activation = SILU
    ) -> None:
        group = context.groups.tensor
        outputs = Share.of_features(out_size, group.rank, group.size)
        parts = {"gate": outputs, "up": outputs}
        super().__init__(Share.whole(in_size), parts, has_bias=has_bias, context=context)
        self.outputs, self.activation = outputs, activation

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Apply to x [T, K]: [T, I], I being the size of each part."""
        kernels = self._context.kernels
        if adapter_ids is None or self.adapters is None:
            return kernels.activated_linear(self.selected(x), self.packed, self.activation)
        both = self._adapted(x, adapter_ids, is_gated=True)  # [T, 2 * I]
        return kernels.activate(both, self.activation)


class UpLinear(MergedLinear):
    """The first half of an MLP without gates."""

    def __init__(self, in_size: int, out_size: int, *, has_bias: bool, context: BuildContext) -> None:
        group = context.groups.tensor
        self.outputs = Share.of_features(out_size, group.rank, group.size)
        super().__init__(Share.whole(in_size), {"": self.outputs}, has_bias=has_bias, context=context)


def _join(part: str, parameter: str) -> str:
    return f"{part}.{parameter}" if part else parameter
