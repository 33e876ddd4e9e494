"""Linear attention by the gated delta rule: projections, a short convolution, the rule, a gated norm, a projection.

Under tensor parallelism each rank has some value heads, and the key heads that they share.

Legend: T = tokens, D = hidden size; the rest as in `kernels/gated_delta.py`.
"""

import torch

from octavo.config.layers import GatedDeltaSpec
from octavo.distributed.groups import HeadShare, Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.gated_delta import GatedDeltaWeights
from octavo.kernels.quantization import Weight
from octavo.kernels.states import StateStep, StateTensors
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, RegroupedLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.base import TensorSpec
from octavo.layers.quant.gguf import BlockScheme
from octavo.layers.state_mixer import StateMixer
from octavo.layers.state_weights import StateWeights, channels_of, conv_spec


class GatedDeltaMixer(StateMixer):
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
        super().__init__(kv_group=kv_group, is_last=is_last, context=context)
        ranks = context.groups.tensor
        heads = HeadShare.of(spec.num_value_heads, spec.num_key_heads, ranks.rank, ranks.size)
        key, value = heads.kv.times(spec.key_size), heads.query.times(spec.value_size)
        inputs = Share.whole(hidden_size)
        self.rows = RegroupedLinear(
            inputs,
            {"q": key, "k": key, "v": value, "z": value},
            stored={"qkvz": ("q", "k", "v", "z")} if spec.has_rows_by_head else {"qkv": ("q", "k", "v"), "z": ("z",)},
            num_groups=spec.num_key_heads if spec.has_rows_by_head else 1,
            has_bias=False,
            context=context.at("rows"),
        )
        self.gates = RegroupedLinear(
            inputs,
            {"b": heads.query, "a": heads.query},
            stored={"ba": ("b", "a")} if spec.has_gates_by_head else {"b": ("b",), "a": ("a",)},
            num_groups=spec.num_key_heads if spec.has_gates_by_head else 1,
            has_bias=False,
            context=context.at("gates"),
        )
        self.recurrence = RecurrenceWeights(spec, heads, eps, context=context)
        self.output = DeltaOutput(spec, value, hidden_size, context=context.at("output"))

    def mix(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: StateTensors,
        step: StateStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = norm.add(x, residual)
        inputs = self.recurrence.values, self.rows(normed), self.gates(normed)
        return self._kernels.gated_delta_net(*inputs, states, step), residual


class DeltaOutput(Linear):
    """The last projection. Columns of a file's blocks are in its order: head h is of key head h modulo their number."""

    def __init__(self, spec: GatedDeltaSpec, inputs: Share, out_size: int, *, context: BuildContext) -> None:
        super().__init__(inputs, out_size, has_bias=False, context=context)
        self._spec = spec
        if self._is_in_rounds and not inputs.is_whole:
            what = f"{spec.num_value_heads} value heads share {spec.num_key_heads} key heads"
            hint = "their columns in a GGUF file are not divided among ranks; set quantization='dequantize'"
            raise UnsupportedModelError(f"{context.path}: {self.scheme.name}: {what}: {hint}")

    @property
    def _is_in_rounds(self) -> bool:
        return isinstance(self.scheme, BlockScheme) and self._spec.has_heads_in_rounds

    def _pack(self, weight: Weight, bias: torch.Tensor | None) -> None:
        super()._pack(weight, bias)
        if self._is_in_rounds:
            spec = self._spec
            by_key = torch.arange(self.inputs.total, dtype=torch.int32).view(spec.num_key_heads, -1, spec.value_size)
            self._columns = by_key.transpose(0, 1).flatten().to(self._context.device)


class RecurrenceWeights(StateWeights):
    """The weights of the convolution, of forgetting, and of the norm behind; `values` are this rank's heads."""

    def __init__(self, spec: GatedDeltaSpec, heads: HeadShare, eps: float, *, context: BuildContext) -> None:
        self._spec, self._heads = spec, heads
        mine = spec.with_heads(heads.kv.size, heads.query.size)
        sizes = ((spec.conv_size, mine.num_channels), mine.num_value_heads, mine.num_value_heads, spec.value_size)
        conv, decay_rates, dt_bias, norm = (
            torch.empty(size, dtype=torch.float32, device=context.device) for size in sizes
        )
        names = {"conv.weight": conv, "A_log": decay_rates, "dt_bias": dt_bias, "norm.weight": norm}
        super().__init__(names, context=context)
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
        heads = (spec.num_value_heads,)
        return {
            "conv.weight": conv_spec(spec.num_channels, spec.conv_size),
            "A_log": TensorSpec(heads),
            "dt_bias": TensorSpec(heads),
            "norm.weight": TensorSpec((spec.value_size,)),
        }

    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        spec, heads = self._spec, self._heads
        if name == "norm.weight":
            return tensor
        if name != "conv.weight":
            return tensor[heads.query.start : heads.query.stop]
        key, value = heads.kv.times(spec.key_size), heads.query.times(spec.value_size)
        return channels_of(tensor, (key, key, value))
