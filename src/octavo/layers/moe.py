"""A mixture of experts: each token is answered by a few of many MLPs, which a router chooses for it.

Shazeer et al. 2017, arXiv:1701.06538. What is computed is in `kernels/reference.py`: `route`, `expert_rows`,
`combine_experts`, and `moe`, which is all of them.

Legend: T = tokens, D = hidden size, X = experts.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import nn

from octavo.config.model import MoEConfig
from octavo.distributed.shares import Share
from octavo.kernels.types import Activation, PackedExperts, PackedLinear, Routes, Routing
from octavo.layers.context import BuildContext
from octavo.layers.linear import GatedLinear, Linear, MergedLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.weight_owner import WeightOwner


class ExpertRouter(MergedLinear):
    """From tokens to logits of experts; where there is a shared expert, its gate is one logit more."""

    role = "router"

    def __init__(self, hidden_size: int, moe: MoEConfig, *, context: BuildContext) -> None:
        parts = {"experts": Share.whole(moe.num_experts)}
        if moe.shared_intermediate_size is not None:
            parts["shared"] = Share.whole(1)
        super().__init__(Share.whole(hidden_size), parts, has_bias=False, context=context)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """See `MergedLinear.pack`."""
        return self._context.kernels.pack_router(weight)


class Expert(nn.Module):
    """The weights of down(silu(gate(x)) * up(x)). They are computed with, all experts at once, by the mixture."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, context: BuildContext) -> None:
        super().__init__()
        self.gate_up = GatedLinear(hidden_size, intermediate_size, has_bias=False, context=context)
        self.down = Linear(self.gate_up.outputs, hidden_size, has_bias=False, context=context)


class LinearOnOtherRank(WeightOwner):
    """A linear layer that another rank holds: a checkpoint must bring it, and nothing of it is read here."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = dict(shapes)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        return

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not tensors


class ExpertOnOtherRank(nn.Module):
    """An expert that another rank holds."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        into = (intermediate_size, hidden_size)
        self.gate_up = LinearOnOtherRank({"gate.weight": into, "up.weight": into})
        self.down = LinearOnOtherRank({"weight": (hidden_size, intermediate_size)})


class MixtureOfExperts(nn.Module):
    """In place of the MLP of a layer. `load` [X] int64 counts the tokens that chose each expert, since the start.

    Several ranks hold a slice of each expert; `layers/expert_parallel.py` deals out whole ones instead.
    """

    def __init__(
        self, layer: int, hidden_size: int, moe: MoEConfig, activation: Activation, *, context: BuildContext
    ) -> None:
        super().__init__()
        self.layer, self._activation = layer, activation
        self._context, self._kernels, self._group = context, context.kernels, context.groups.tensor
        self._routing = Routing(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            renormalizes=moe.renormalizes,
            has_shared=moe.shared_intermediate_size is not None,
        )
        self.router = ExpertRouter(hidden_size, moe, context=context)
        self.experts = nn.ModuleList(
            self.build_expert(number, hidden_size, moe.intermediate_size) for number in range(moe.num_experts)
        )
        self.shared_expert: Expert | None = None
        if moe.shared_intermediate_size is not None:
            self.shared_expert = Expert(hidden_size, moe.shared_intermediate_size, context=context)
        self.load = torch.zeros(moe.num_experts, dtype=torch.int64, device=context.device)
        self.is_counted: torch.Tensor | None = None  # [T] int64, of a step with padding

    def build_expert(self, number: int, hidden_size: int, intermediate_size: int) -> Expert | ExpertOnOtherRank:
        """Compose expert number `number`."""
        return Expert(hidden_size, intermediate_size, context=self._context)

    @cached_property
    def packed(self) -> PackedExperts:
        """The experts of this rank, the shared one last."""
        experts = [expert for expert in (*self.experts, self.shared_expert) if isinstance(expert, Expert)]
        return self._kernels.pack_experts(
            [expert.gate_up.packed for expert in experts], [expert.down.packed for expert in experts]
        )

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the stream [T, D]; return (what the experts add to the sum, the sum)."""
        out, total = self._kernels.moe(
            x,
            norm.fused(residual, self._activation),
            self.router.packed,
            self._routing,
            self.packed,
            self.load,
            self.is_counted,
        )
        return self._group.all_reduce(out), total

    def count(self, routes: Routes) -> None:
        """Add to `load` what tokens have chosen."""
        chosen = routes.expert_ids[:, : self._routing.top_k].flatten()
        self.load += torch.bincount(chosen, minlength=self._routing.num_experts)
