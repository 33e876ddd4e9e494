"""Mixture of experts: a router chooses a few of many MLPs for each token.

Shazeer et al. 2017, arXiv:1701.06538. The math is in `kernels/reference.py`: `route`, `expert_rows`,
`combine_experts`, and `moe`, which is all of them.

Legend: T = tokens, D = hidden size, X = experts.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import nn

from octavo.config.model import MoEConfig
from octavo.distributed.shares import Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.types import Activation, ExpertAdapters, PackedExperts, Routes, Routing
from octavo.layers.context import BuildContext
from octavo.layers.linear import GatedLinear, Linear, MergedLinear
from octavo.layers.norm import RMSNorm


class ExpertRouter(MergedLinear):
    """Router logits of tokens; a shared expert's gate is one more logit."""

    role = "router"

    def __init__(self, hidden_size: int, moe: MoEConfig, *, context: BuildContext) -> None:
        parts = {"experts": Share.whole(moe.num_experts)}
        if moe.shared_intermediate_size is not None:
            parts["shared"] = Share.whole(1)
        super().__init__(Share.whole(hidden_size), parts, has_bias=False, context=context)


class Expert(nn.Module):
    """The weights of down(silu(gate(x)) * up(x)). The mixture computes all experts at once."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, context: BuildContext) -> None:
        super().__init__()
        gate_up, down = context.at("gate_up"), context.at("down")
        self.gate_up = GatedLinear(hidden_size, intermediate_size, has_bias=False, context=gate_up)
        self.down = Linear(self.gate_up.outputs, hidden_size, has_bias=False, context=down)


class LinearElsewhere(MergedLinear):
    """A linear layer of another rank: required in the checkpoint, but not loaded here."""

    @property
    def num_weights(self) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return 0

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        return

    def process_weights_after_loading(self) -> None:
        return

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not tensors


class ExpertOnOtherRank(nn.Module):
    """An expert of another rank."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, context: BuildContext) -> None:
        super().__init__()
        hidden, inner = Share.whole(hidden_size), Share.whole(intermediate_size)
        gate_up, down = context.at("gate_up"), context.at("down")
        self.gate_up = LinearElsewhere(hidden, {"gate": inner, "up": inner}, has_bias=False, context=gate_up)
        self.down = LinearElsewhere(inner, {"": hidden}, has_bias=False, context=down)


class MixtureOfExperts(nn.Module):
    """Replaces the MLP of a layer. `load` [X] int64 counts the tokens that chose each expert, since the start.

    Each rank holds a shard of every expert; `layers/expert_parallel.py` distributes whole experts instead.
    """

    def __init__(
        self, layer: int, hidden_size: int, moe: MoEConfig, activation: Activation, *, context: BuildContext
    ) -> None:
        super().__init__()
        self.layer, self._activation = layer, activation
        context = context.at(f"layers.{layer}.mlp")
        self._context, self._kernels, self._group = context, context.kernels, context.groups.tensor
        self._routing = Routing(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            renormalizes=moe.renormalizes,
            has_shared=moe.shared_intermediate_size is not None,
        )
        self.router = ExpertRouter(hidden_size, moe, context=context.at("router"))
        self.experts = nn.ModuleList(
            self.build_expert(number, hidden_size, moe.intermediate_size) for number in range(moe.num_experts)
        )
        self.shared_expert: Expert | None = None
        if moe.shared_intermediate_size is not None:
            size = moe.shared_intermediate_size
            self.shared_expert = Expert(hidden_size, size, context=context.at("shared_expert"))
        self._check_schemes()
        self.load = torch.zeros(moe.num_experts, dtype=torch.int64, device=context.device)
        self.is_counted: torch.Tensor | None = None  # [T] int64, if the step is padded

    def build_expert(self, number: int, hidden_size: int, intermediate_size: int) -> Expert | ExpertOnOtherRank:
        """Build expert number `number`."""
        return Expert(hidden_size, intermediate_size, context=self._context.at(f"experts.{number}"))

    @property
    def packed(self) -> PackedExperts:
        """The experts of this rank, the shared one last."""
        return self._pack() if self._is_compressed else self._packed

    @cached_property
    def _packed(self) -> PackedExperts:
        return self._pack()

    @cached_property
    def _is_compressed(self) -> bool:
        return any(linear.is_compressed for linear in self._linears)

    @cached_property
    def _linears(self) -> list[MergedLinear]:
        """This rank's linears, two per expert."""
        experts = [expert for expert in (*self.experts, self.shared_expert) if isinstance(expert, Expert)]
        return [linear for expert in experts for linear in (expert.gate_up, expert.down)]

    def _pack(self) -> PackedExperts:
        packed = [linear.packed for linear in self._linears]
        return self._kernels.pack_experts(packed[0::2], packed[1::2])

    def _check_schemes(self) -> None:
        names = {linear.scheme.family: linear.scheme.name for linear in self._linears}
        if len(names) > 1:
            found = ", ".join(names.values())
            raise UnsupportedModelError(f"experts of layer {self.layer} must have one weight format, found: {found}")

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (the experts' output on the sum, the sum)."""
        fused = norm.fused(residual, self._activation)
        experts = self.router.packed, self._routing, self.packed, self.load
        if (adapters := self.adapters_of(adapter_ids)) is None:
            out, total = self._kernels.moe(x, fused, *experts, self.is_counted)
        else:
            out, total = self._kernels.adapted_moe(x, fused, *experts, adapters)
        return self._group.all_reduce(out), total

    @property
    def has_adapters(self) -> bool:
        """Whether its experts have slots for adapters: steps with some then run op by op."""
        return any(linear.adapters is not None for linear in self._linears)

    def adapters_of(self, adapter_ids: torch.Tensor | None) -> ExpertAdapters | None:
        """Return what adapters [T] add to this rank's experts; None: nothing."""
        if adapter_ids is None or not self.has_adapters:
            return None
        slots = [linear.adapters for linear in self._linears if linear.adapters is not None]
        assert len(slots) == len(self._linears), "all experts have slots, or none has"
        return ExpertAdapters(gate_up=tuple(slots[0::2]), down=tuple(slots[1::2]), adapter_ids=adapter_ids)

    def count(self, routes: Routes) -> None:
        """Add the tokens' choices to `load`."""
        chosen = routes.expert_ids[:, : self._routing.top_k].flatten()
        self.load += torch.bincount(chosen, minlength=self._routing.num_experts)
