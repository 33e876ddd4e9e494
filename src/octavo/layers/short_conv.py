"""A short convolution between two gates, in the place of attention (LFM2): projections around it.

Under tensor parallelism each rank has some channels.

Legend: T = tokens, D = hidden size; the rest as in `kernels/short_conv.py`.
"""

import torch

from octavo.config.layers import ShortConvSpec
from octavo.distributed.groups import Share
from octavo.kernels.short_conv import ShortConvWeights
from octavo.kernels.states import StateStep, StateTensors
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, one_tensor_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.base import TensorSpec
from octavo.layers.state_mixer import StateMixer
from octavo.layers.state_weights import StateWeights, conv_spec


class ShortConvMixer(StateMixer):
    """Mixes the tokens of a request in a layer that keeps what its convolution sees."""

    def __init__(
        self, spec: ShortConvSpec, hidden_size: int, *, kv_group: int, is_last: bool, context: BuildContext
    ) -> None:
        super().__init__(kv_group=kv_group, is_last=is_last, context=context)
        ranks = context.groups.tensor
        channels = Share.of_features(spec.num_channels, ranks.rank, ranks.size)
        parts = dict.fromkeys(("before", "after", "values"), channels)
        inputs, has_bias = Share.whole(hidden_size), spec.has_bias
        self.rows = one_tensor_linear(inputs, parts, has_bias=has_bias, context=context.at("rows"))
        self.conv = ConvWeights(spec, channels, context=context)
        self.output = Linear(channels, hidden_size, has_bias=has_bias, context=context.at("output"))

    def mix(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        states: StateTensors,
        step: StateStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, residual = self.rows.of_normed(norm, x, residual)
        return self._kernels.short_conv(self.conv.values, rows, states, step), residual


class ConvWeights(StateWeights):
    """The weights of the convolution; `values` are this rank's channels."""

    def __init__(self, spec: ShortConvSpec, channels: Share, *, context: BuildContext) -> None:
        self._spec, self._channels = spec, channels
        conv, bias = (
            torch.empty(size, dtype=torch.float32, device=context.device)
            for size in ((spec.conv_size, channels.size), (channels.size,))
        )
        self.values = ShortConvWeights(conv=conv, bias=bias if spec.has_bias else None)
        super().__init__({"conv.weight": conv, **({"conv.bias": bias} if spec.has_bias else {})}, context=context)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        weight = {"conv.weight": conv_spec(self._spec.num_channels, self._spec.conv_size)}
        return {**weight, "conv.bias": TensorSpec((self._spec.num_channels,))} if self._spec.has_bias else weight

    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self._channels.start : self._channels.stop]
