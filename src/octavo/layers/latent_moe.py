"""Experts that read and write vectors smaller than tokens, beside one that reads tokens (Nemotron 3).

Legend: T = tokens, D = hidden size, K = size of the vectors, C = experts per token.
"""

import torch
from msgspec import structs
from torch import nn

from octavo.config.layers import ExpertsSpec
from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.types import Activation
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, MergedLinear, UpLinear
from octavo.layers.moe import Expert, ExpertOnOtherRank, MixtureOfExperts
from octavo.layers.norm import RMSNorm


class BesideExperts(nn.Module):
    """The weights of what every token uses: down(activation(up(x)))."""

    def __init__(self, hidden_size: int, inner_size: int, *, context: BuildContext) -> None:
        super().__init__()
        self.gate_up = UpLinear(hidden_size, inner_size, has_bias=False, context=context.at("gate_up"))
        self.down = Linear(self.gate_up.outputs, hidden_size, has_bias=False, context=context.at("down"))


class LatentMixture(MixtureOfExperts):
    """Routed by the tokens, which are projected before all experts; their weighted sum is projected back."""

    is_recordable = False  # experts do not read what the router reads

    def __init__(
        self, layer: int, hidden_size: int, moe: ExpertsSpec, activation: Activation, *, context: BuildContext
    ) -> None:
        assert moe.latent_size is not None, "a mixture of this kind has vectors of its own"
        if context.groups.experts.size > 1:
            raise UnsupportedModelError(f"layer {layer}: expert parallelism is not supported with moe_latent_size")
        routed = structs.replace(moe, shared_intermediate_size=None)
        super().__init__(layer, hidden_size, routed, activation, context=context)
        own, outer, inner = self._context, Share.whole(hidden_size), Share.whole(moe.latent_size)
        self.latent_down = MergedLinear(outer, {"": inner}, has_bias=False, context=own.at("latent_down"))
        self.latent_up = MergedLinear(inner, {"": outer}, has_bias=False, context=own.at("latent_up"))
        self.beside: BesideExperts | None = None
        if moe.shared_intermediate_size is not None:
            self.beside = BesideExperts(hidden_size, moe.shared_intermediate_size, context=own.at("beside"))

    def build_expert(self, number: int, hidden_size: int, moe: ExpertsSpec) -> Expert | ExpertOnOtherRank:
        assert moe.latent_size is not None, "a mixture of this kind has vectors of its own"
        return super().build_expert(number, moe.latent_size, moe)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MixtureOfExperts.forward`."""
        kernels, num_choices = self._kernels, self._routing.num_choices
        normed, total = norm.add(x, residual)
        routes = kernels.route(normed, self.router.packed, self._routing)
        self.count(routes)
        latent = self.latent_down(normed)  # [T, K]
        token_ids = torch.arange(len(x), device=x.device).repeat_interleave(num_choices)  # [T * C]
        pairs = latent, token_ids, routes.expert_ids.flatten(), self.packed, self._activation
        adapters = self.adapters_of(adapter_ids)
        rows = kernels.expert_rows(*pairs) if adapters is None else kernels.adapted_expert_rows(*pairs, adapters)
        out = self.latent_up(kernels.combine_experts(rows.view(len(x), num_choices, -1), routes.weights))
        if self.beside is not None:
            inner = kernels.activate(self.beside.gate_up(normed, adapter_ids), self._activation)
            out = kernels.scaled_sum(out, MergedLinear.forward(self.beside.down, inner, adapter_ids), 1.0)
        return self._group.all_reduce(out), total  # of parts of both
