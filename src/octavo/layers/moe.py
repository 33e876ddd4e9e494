"""Mixture of experts: a router chooses a few of many MLPs for each token.

Shazeer et al. 2017, arXiv:1701.06538. The math is in `kernels/reference.py`: `route`, `expert_rows`,
`combine_experts`, and `moe`, which is all of them.

Under expert parallelism, whole experts are sharded over the ranks of a layer; their outputs are exchanged, not summed.
Attention leaves all tokens of the step on all of these ranks. So each rank routes all tokens, which is cheaper than
communicating, computes its own experts, and knows what every rank will send. The tokens are then divided into slices:
each rank receives the expert outputs for its slice, combines them as a single rank would, and all-gathers the result. A
shared expert is replicated, and computed for the rank's own slice.

Legend: T = tokens, D = hidden size, X = experts, C = experts per token, R = pairs of a token and an expert.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from octavo.config.layers import ExpertsSpec
from octavo.distributed.groups import ParallelGroups, Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.reference import ExpertAdapters
from octavo.kernels.types import Activation, PackedExperts, Routes, Routing
from octavo.layers.context import BuildContext
from octavo.layers.linear import GatedLinear, Linear, MergedLinear, UpLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.base import TensorSpec

CORRECTION = "experts.e_score_correction_bias"


class ExpertRouter(MergedLinear):
    """Router logits of tokens; a shared expert's gate is one more logit. With the correction of scores, if any."""

    role = "router"

    def __init__(self, hidden_size: int, moe: ExpertsSpec, *, context: BuildContext) -> None:
        parts = {"experts": Share.whole(moe.num_experts)}
        if moe.shared_intermediate_size is not None and moe.routing.gates_shared:
            parts["shared"] = Share.whole(1)
        super().__init__(Share.whole(hidden_size), parts, has_bias=moe.has_router_bias, context=context)
        self.correction: torch.Tensor | None = None
        if moe.routing.has_correction:
            self.correction = torch.zeros(moe.num_experts, dtype=torch.float32, device=context.device)  # [X]

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        tensors = super().checkpoint_tensors()
        if self.correction is None:
            return tensors
        size = len(self.correction)
        return {**tensors, CORRECTION: TensorSpec((size,), other_shapes=((1, size),))}

    @property
    def num_weights(self) -> int:
        return super().num_weights + (0 if self.correction is None else len(self.correction))

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        if name == CORRECTION:
            assert self.correction is not None, "named by checkpoint_tensors"
            self.correction.copy_(tensor.flatten())
        else:
            super().load_weight(name, tensor)

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().shard_of(tensors) | {name: tensors[name] for name in (CORRECTION,) if name in tensors}

    def adopt_shard(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().adopt_shard(self._without_correction(tensors))

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        packed = super().packed_tensors()
        return packed if packed is None or self.correction is None else {**packed, CORRECTION: self.correction}

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().adopt_packed(self._without_correction(tensors))

    def _without_correction(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take the correction; return the other tensors."""
        if self.correction is not None:
            self.load_weight(CORRECTION, tensors[CORRECTION])
        return {name: tensor for name, tensor in tensors.items() if name != CORRECTION}


class Expert(nn.Module):
    """The weights of down(silu(gate(x)) * up(x)), or without gates. The mixture computes all experts at once."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        has_bias: bool = False,
        is_gated: bool = True,
        context: BuildContext,
    ) -> None:
        super().__init__()
        gate_up, down = context.at("gate_up"), context.at("down")
        first = GatedLinear if is_gated else UpLinear
        self.gate_up = first(hidden_size, intermediate_size, has_bias=has_bias, context=gate_up)
        self.down = Linear(self.gate_up.outputs, hidden_size, has_bias=has_bias, context=down)


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

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, has_bias: bool, is_gated: bool, context: BuildContext
    ) -> None:
        super().__init__()
        hidden, inner = Share.whole(hidden_size), Share.whole(intermediate_size)
        gate_up, down = context.at("gate_up"), context.at("down")
        parts = {"gate": inner, "up": inner} if is_gated else {"": inner}
        self.gate_up = LinearElsewhere(hidden, parts, has_bias=has_bias, context=gate_up)
        self.down = LinearElsewhere(inner, {"": hidden}, has_bias=has_bias, context=down)


class MixtureOfExperts(nn.Module):
    """Replaces the MLP of a layer; each rank holds a shard of every expert.

    `load` [X] int64 counts the tokens that chose each expert, since the start.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        moe: ExpertsSpec,
        activation: Activation,
        *,
        context: BuildContext,
        name: str = "mlp",  # of this part of the layer
    ) -> None:
        super().__init__()
        self.layer, self._activation = layer, activation
        context = context.at(f"layers.{layer}.{name}")
        self._context, self._kernels, self._group = context, context.kernels, context.groups.tensor
        shared_size = moe.shared_intermediate_size
        self.router = ExpertRouter(hidden_size, moe, context=context.at("router"))
        self._routing = Routing(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            renormalizes=moe.renormalizes,
            has_shared=shared_size is not None,
            rule=moe.routing,
            correction=self.router.correction,
        )
        self.experts = nn.ModuleList(self.build_expert(number, hidden_size, moe) for number in range(moe.num_experts))
        self.shared_expert: Expert | None = None
        if shared_size is not None:
            own = context.at("shared_expert")
            self.shared_expert = Expert(hidden_size, shared_size, is_gated=activation.is_gated, context=own)
        names = {linear.scheme.family: linear.scheme.name for linear in self._linears}
        if len(names) > 1:
            found = ", ".join(names.values())
            raise UnsupportedModelError(f"experts of layer {self.layer} must have one weight format, found: {found}")
        self.load = torch.zeros(moe.num_experts, dtype=torch.int64, device=context.device)
        self.is_counted: torch.Tensor | None = None  # [T] int64, if the step is padded
        self._packed: PackedExperts | None = None

    def build_expert(self, number: int, hidden_size: int, moe: ExpertsSpec) -> Expert | ExpertOnOtherRank:
        context = self._context.at(f"experts.{number}")
        is_gated = self._activation.is_gated
        return Expert(hidden_size, moe.intermediate_size, has_bias=moe.has_bias, is_gated=is_gated, context=context)

    @property
    def packed(self) -> PackedExperts:
        """The experts of this rank, the shared one last."""
        if self._packed is not None:
            return self._packed
        packed = [linear.packed for linear in self._linears]
        experts = self._kernels.pack_experts(packed[0::2], packed[1::2])
        if not any(linear.is_compressed for linear in self._linears):
            self._packed = experts
        return experts

    @cached_property
    def _linears(self) -> list[MergedLinear]:
        """This rank's linears, two per expert."""
        experts = [expert for expert in (*self.experts, self.shared_expert) if isinstance(expert, Expert)]
        return [linear for expert in experts for linear in (expert.gate_up, expert.down)]

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (the experts' output on the sum, the sum)."""
        fused = norm.fused(residual, self._activation)
        experts, adapters = (self.router.packed, self._routing, self.packed), self.adapters_of(adapter_ids)
        out, total = self._kernels.moe(x, fused, *experts, self.load, self.is_counted, adapters)
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


class ExpertParallelMoE(MixtureOfExperts):
    """A mixture sharded over the ranks of `context.groups.experts`. Results have the bits of a single rank."""

    is_recordable = False  # the rows each rank gets depend on the routing

    def __init__(
        self, layer: int, hidden_size: int, moe: ExpertsSpec, activation: Activation, *, context: BuildContext
    ) -> None:
        self._ranks = context.groups.experts
        self._expert_shares = [Share.of(moe.num_experts, rank, self._ranks.size) for rank in range(self._ranks.size)]
        # Experts are whole, so their layers see a single rank.
        super().__init__(layer, hidden_size, moe, activation, context=replace(context, groups=ParallelGroups()))

    def build_expert(self, number: int, hidden_size: int, moe: ExpertsSpec) -> Expert | ExpertOnOtherRank:
        held = self._expert_shares[self._ranks.rank]
        if held.start <= number < held.stop:
            return super().build_expert(number, hidden_size, moe)
        context = self._context.at(f"experts.{number}")
        sizes, is_gated = (hidden_size, moe.intermediate_size), self._activation.is_gated
        return ExpertOnOtherRank(*sizes, has_bias=moe.has_bias, is_gated=is_gated, context=context)

    @cached_property
    def _owners(self) -> torch.Tensor:
        """The rank that holds each expert, [X]."""
        sizes = torch.tensor([share.size for share in self._expert_shares], device=self.load.device)
        return torch.arange(self._ranks.size, device=self.load.device).repeat_interleave(sizes)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = norm.add(x, residual)
        routes = self._kernels.route(normed, self.router.packed, self._routing)
        self.count(routes)
        slices = [Share.of(len(x), rank, self._ranks.size) for rank in range(self._ranks.size)]  # of tokens
        owners = self._owners_of_pairs(routes, slices)
        computed = self._expert_outputs(normed, routes, owners, self.adapters_of(adapter_ids))
        expert_outputs = self._exchange(computed, owners, slices)
        mine = slices[self._ranks.rank]
        out = self._kernels.combine_experts(expert_outputs, routes.weights[mine.start : mine.stop])
        size = self._ranks.size
        return self._ranks.all_to_all(out.repeat(size, 1), [len(out)] * size)[0], total  # [T, D] of all ranks

    def _owners_of_pairs(self, routes: Routes, slices: list[Share]) -> torch.Tensor:
        """Return which rank computes each pair, [T, C]."""
        chosen = routes.expert_ids[:, : self._routing.top_k]
        owners = self._owners[chosen]
        if not self._routing.has_shared:
            return owners
        sizes = torch.tensor([tokens.size for tokens in slices], device=owners.device)
        of_shared = torch.arange(len(slices), device=owners.device).repeat_interleave(sizes)  # [T]
        return torch.cat((owners, of_shared.unsqueeze(1)), dim=1)

    def _expert_outputs(
        self, normed: torch.Tensor, routes: Routes, owners: torch.Tensor, adapters: ExpertAdapters | None
    ) -> torch.Tensor:
        """Compute this rank's pairs [R, D], in the order of tokens."""
        held = self._expert_shares[self._ranks.rank]
        token_ids, choices = (owners == self._ranks.rank).nonzero().unbind(1)  # [R] each
        expert_ids = routes.expert_ids[token_ids, choices]
        is_shared = expert_ids == self._routing.num_experts
        local_ids = torch.where(is_shared, held.size, expert_ids - held.start)
        pairs = normed, token_ids, local_ids, self.packed, self._activation
        if adapters is None:
            return self._kernels.expert_rows(*pairs)
        return self._kernels.adapted_expert_rows(*pairs, adapters)

    def _exchange(self, expert_outputs: torch.Tensor, owners: torch.Tensor, slices: list[Share]) -> torch.Tensor:
        """Send expert outputs [R, D] to the ranks that combine them; return those of this rank's tokens, [T, C, D]."""
        counts = [int((owners[to.start : to.stop] == self._ranks.rank).sum()) for to in slices]
        came, _ = self._ranks.all_to_all(expert_outputs, counts)
        mine = slices[self._ranks.rank]
        places = owners[mine.start : mine.stop].flatten().argsort(stable=True)  # index of received rows, rank by rank
        in_order = torch.empty_like(came)
        in_order[places] = came
        return in_order.view(mine.size, owners.shape[1], expert_outputs.shape[1])
