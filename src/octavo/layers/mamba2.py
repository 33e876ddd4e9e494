"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): projections around a state space, with a norm behind it.

Under tensor parallelism each rank has some heads, and the groups that they are in. The norm is over whole groups, so
ranks that share one add up their sums of squares.

Legend: T = tokens, D = hidden size; the rest as in `kernels/state_space.py`.
"""

import torch

from octavo.config.layers import Mamba2Spec
from octavo.distributed.groups import HeadShare, Share
from octavo.kernels.state_space import GroupNorm, StateSpaceWeights
from octavo.kernels.states import StateStep, StateTensors
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, one_tensor_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.base import TensorSpec
from octavo.layers.state_mixer import StateMixer
from octavo.layers.state_weights import StateWeights, channels_of, conv_spec


class Mamba2Mixer(StateMixer):
    """Mixes the tokens of a request in a layer that keeps a state."""

    def __init__(
        self, spec: Mamba2Spec, hidden_size: int, eps: float, *, kv_group: int, is_last: bool, context: BuildContext
    ) -> None:
        super().__init__(kv_group=kv_group, is_last=is_last, context=context)
        ranks = context.groups.tensor
        heads = HeadShare.of(spec.num_heads, spec.num_groups, ranks.rank, ranks.size)
        width, keys = heads.query.times(spec.head_dim), heads.kv.times(spec.state_size)
        self.rows = one_tensor_linear(
            Share.whole(hidden_size),
            {"gates": width, "values": width, "keys": keys, "queries": keys, "steps": heads.query},
            has_bias=spec.has_bias,
            context=context.at("rows"),
        )
        self.space = SpaceWeights(spec, heads, context=context)
        self.norm = None if spec.norm == "none" else SharedNorm(spec, width, eps, context=context)
        self._gates_normed = spec.norm == "before_gate"
        self.output = Linear(width, hidden_size, has_bias=spec.has_out_bias, context=context.at("output"))

    def mix(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: StateTensors,
        step: StateStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, residual = self.rows.of_normed(norm, x, residual)
        mixed = self._kernels.state_space(self.space.values, rows, states, step)
        if self.norm is not None:
            mixed = self.norm(mixed, rows[:, : mixed.shape[1]] if self._gates_normed else None)
        return mixed, residual


class SpaceWeights(StateWeights):
    """The weights of the convolution and of the state space; `values` are this rank's heads."""

    def __init__(self, spec: Mamba2Spec, heads: HeadShare, *, context: BuildContext) -> None:
        self._spec, self._heads = spec, heads
        mine = spec.with_heads(heads.kv.size, heads.query.size)
        channels, count = mine.num_channels, mine.num_heads
        sizes = ((spec.conv_size, channels), (channels,), (count,), (count,), (count,))
        conv, bias, decay_rates, dt_bias, skip = (
            torch.empty(size, dtype=torch.float32, device=context.device) for size in sizes
        )
        names = {"conv.weight": conv, "A_log": decay_rates, "dt_bias": dt_bias, "D": skip}
        super().__init__({**names, **({"conv.bias": bias} if spec.has_conv_bias else {})}, context=context)
        self.values = StateSpaceWeights(
            num_groups=mine.num_groups,
            num_heads=count,
            key_size=spec.state_size,
            value_size=spec.head_dim,
            conv=conv,
            conv_bias=bias if spec.has_conv_bias else None,
            decay_rates=decay_rates,
            dt_bias=dt_bias,
            skip=skip,
            dt_limit=spec.dt_limit,
            dt_scale=spec.input_scales[4],
            gate_scale=spec.input_scales[0],
            applies_gates=spec.norm != "before_gate",
        )

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        spec = self._spec
        count = spec.num_heads
        tensors = {
            "conv.weight": conv_spec(spec.num_channels, spec.conv_size),
            "A_log": TensorSpec((count,), other_shapes=((count, 1),)),
            "dt_bias": TensorSpec((count,)),
            "D": TensorSpec((count,), other_shapes=((count, 1),)),
        }
        return {**tensors, "conv.bias": TensorSpec((spec.num_channels,))} if spec.has_conv_bias else tensors

    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.startswith("conv."):
            return tensor.flatten()[self._heads.query.start : self._heads.query.stop]
        return channels_of(tensor, self._kinds)

    @property
    def _kinds(self) -> tuple[Share, Share, Share]:
        """The channels of values, keys and queries."""
        keys = self._heads.kv.times(self._spec.state_size)
        return self._heads.query.times(self._spec.head_dim), keys, keys

    def scales(self, name: str) -> torch.Tensor | None:
        """What is projected is scaled by scaling the convolution's taps."""
        factors = self._spec.input_scales[1:4]
        if name != "conv.weight" or set(factors) == {1.0}:
            return None
        return torch.cat([torch.full((of.size,), factor) for of, factor in zip(self._kinds, factors, strict=True)])


class SharedNorm(StateWeights):
    """The norm of each group's columns."""

    def __init__(self, spec: Mamba2Spec, columns: Share, eps: float, *, context: BuildContext) -> None:
        self._spec, self._columns, self._ranks = spec, columns, context.groups.tensor
        weight = torch.empty(columns.size, dtype=torch.float32, device=context.device)
        super().__init__({"weight": weight}, context=context)
        self._kernels = context.kernels
        size = columns.total // spec.num_groups
        self.values = GroupNorm(
            weight=weight,
            eps=eps,
            group_size=size,
            num_groups=spec.num_groups,
            first=columns.start,
            gate_scale=spec.input_scales[0],
        )
        self._is_divided = self._ranks.size > spec.num_groups  # some ranks have a part of a group

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        by_group = self._spec.num_groups, self.values.group_size
        return {"weight": TensorSpec((self._columns.total,), other_shapes=(by_group,))}

    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[self._columns.start : self._columns.stop]

    def forward(self, x: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
        """Normalize x [T, W], then multiply by the silu of gates [T, W], if there are any."""
        sums = None
        if self._is_divided:
            sums = self._ranks.all_reduce(self._kernels.group_sums(x, self.values))
        return self._kernels.norm_groups(x, self.values, gates, sums)
