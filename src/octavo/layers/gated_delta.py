"""Linear attention by the gated delta rule: projections, a short convolution, the rule, a gated norm, a projection.

Under tensor parallelism each rank has some value heads, and the key heads that they share.

Legend: T = tokens, W = tokens kept after the last layer, D = hidden size; the rest as in `kernels/gated_delta.py`.
"""

from collections.abc import Mapping

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata
from octavo.config.layers import GatedDeltaSpec
from octavo.distributed.groups import HeadShare, Share
from octavo.kernels.gated_delta import GatedDeltaWeights, StateTensors
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, RegroupedLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner


class GatedDeltaMixer(nn.Module):
    """Mixes the tokens of a request in a layer that keeps a state."""

    def __init__(
        self,
        spec: GatedDeltaSpec,
        hidden_size: int,
        eps: float,
        *,
        kv_group: int,
        is_last: bool,
        context: BuildContext,
    ) -> None:
        super().__init__()
        ranks = context.groups.tensor
        heads = HeadShare.of(spec.num_value_heads, spec.num_key_heads, ranks.rank, ranks.size)
        key, value = heads.kv.times(spec.key_size), heads.query.times(spec.value_size)
        self.is_last, self._kv_group, self._kernels = is_last, kv_group, context.kernels
        inputs = Share.whole(hidden_size)
        by_head = spec.has_rows_by_head
        self.rows = RegroupedLinear(
            inputs,
            {"q": key, "k": key, "v": value, "z": value},
            stored={"qkvz": ("q", "k", "v", "z")} if by_head else {"qkv": ("q", "k", "v"), "z": ("z",)},
            num_groups=spec.num_key_heads if by_head else 1,
            has_bias=False,
            context=context.at("rows"),
        )
        self.gates = RegroupedLinear(
            inputs,
            {"b": heads.query, "a": heads.query},
            stored={"ba": ("b", "a")} if by_head else {"b": ("b",), "a": ("a",)},
            num_groups=spec.num_key_heads if by_head else 1,
            has_bias=False,
            context=context.at("gates"),
        )
        self.recurrence = RecurrenceWeights(spec, heads, eps, context=context)
        self.output = Linear(value, hidden_size, has_bias=False, context=context.at("output"))

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: StateTensors,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (what is mixed, the sum); last layer: [W, D]."""
        normed, residual = self._kernels.add_rms_norm(x, norm.fused(residual))
        inputs = self.recurrence.values, self.rows(normed), self.gates(normed)
        mixed = self._kernels.gated_delta_net(*inputs, states, step.batch.state_step(self._kv_group))
        mixed, residual = step.rows_after(self._kernels, mixed, residual, is_last=self.is_last)
        return self.output(mixed), residual


class RecurrenceWeights(WeightOwner):
    """The weights of the convolution, of forgetting, and of the norm behind; `values` are this rank's heads.

    In float32, as a checkpoint has them; those of the convolution after rounding to the model's dtype.
    """

    def __init__(self, spec: GatedDeltaSpec, heads: HeadShare, eps: float, *, context: BuildContext) -> None:
        super().__init__()
        self._context, self._spec, self._heads = context, spec, heads
        mine = spec.with_heads(heads.kv.size, heads.query.size)
        sizes = ((spec.conv_size, mine.num_channels), mine.num_value_heads, mine.num_value_heads, spec.value_size)
        conv, decay_rates, dt_bias, norm = (
            torch.empty(size, dtype=torch.float32, device=context.device) for size in sizes
        )
        self.values = GatedDeltaWeights(
            num_key_heads=mine.num_key_heads,
            num_value_heads=mine.num_value_heads,
            key_size=spec.key_size,
            value_size=spec.value_size,
            conv=conv,
            decay_rates=decay_rates,
            dt_bias=dt_bias,
            norm=norm,
            eps=eps,
        )

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        spec = self._spec
        channels, heads = spec.num_channels, (spec.num_value_heads,)
        return {
            "conv.weight": TensorSpec((channels, 1, spec.conv_size), other_shapes=((channels, spec.conv_size),)),
            "A_log": TensorSpec(heads),
            "dt_bias": TensorSpec(heads),
            "norm.weight": TensorSpec((spec.value_size,)),
        }

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """What this rank has, by the checkpoint's names."""
        values = self.values
        return {
            "conv.weight": values.conv,
            "A_log": values.decay_rates,
            "dt_bias": values.dt_bias,
            "norm.weight": values.norm,
        }

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self._load(name, self._shard(name, tensor))

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._shard(name, tensor) for name, tensor in tensors.items()}

    def adopt_shard(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._load(name, tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        spec, heads = self._spec, self._heads
        if name == "norm.weight":
            return tensor
        if name != "conv.weight":
            return tensor[heads.query.start : heads.query.stop]
        key, value = heads.kv.times(spec.key_size), heads.query.times(spec.value_size)
        by_kind = tensor.split_with_sizes((key.total, key.total, value.total))
        return torch.cat([rows[of.start : of.stop] for rows, of in zip(by_kind, (key, key, value), strict=True)])

    def _load(self, name: str, shard: torch.Tensor) -> None:
        if name == "conv.weight":
            shard = shard.flatten(1).to(self._context.dtype).T
        elif name == "A_log":
            shard = shard.float().exp()
        self._tensors[name].copy_(shard)
