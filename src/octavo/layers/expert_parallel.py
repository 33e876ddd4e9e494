"""Expert parallelism: whole experts are sharded over the ranks of a layer; expert outputs are exchanged, not summed.

Attention leaves all tokens of the step on all of these ranks. So each rank routes all tokens, which is cheaper than
communicating, computes its own experts, and knows what every rank will send. The tokens are then divided into slices:
each rank receives the expert outputs for its slice, combines them as a single rank would, and all-gathers the result. A
shared expert is replicated, and computed for the rank's own slice.

Legend: T = tokens, D = hidden size, X = experts, C = experts per token, R = pairs of a token and an expert.
"""

from dataclasses import replace
from functools import cached_property

import torch

from octavo.config.model import MoEConfig
from octavo.distributed.groups import ParallelGroups
from octavo.distributed.shares import Share
from octavo.kernels.types import Activation, ExpertAdapters, Routes
from octavo.layers.context import BuildContext
from octavo.layers.moe import Expert, ExpertOnOtherRank, MixtureOfExperts
from octavo.layers.norm import RMSNorm


class ExpertParallelMoE(MixtureOfExperts):
    """A mixture sharded over the ranks of `context.groups.experts`. Results have the bits of a single rank."""

    is_recordable = False  # the rows each rank gets depend on the routing

    def __init__(
        self, layer: int, hidden_size: int, moe: MoEConfig, activation: Activation, *, context: BuildContext
    ) -> None:
        self._ranks = context.groups.experts
        self._expert_shares = [Share.of(moe.num_experts, rank, self._ranks.size) for rank in range(self._ranks.size)]
        # Experts are whole, so their layers see a single rank.
        super().__init__(layer, hidden_size, moe, activation, context=replace(context, groups=ParallelGroups()))

    def build_expert(self, number: int, hidden_size: int, intermediate_size: int) -> Expert | ExpertOnOtherRank:
        """See `MixtureOfExperts.build_expert`."""
        held = self._expert_shares[self._ranks.rank]
        if held.start <= number < held.stop:
            return super().build_expert(number, hidden_size, intermediate_size)
        return ExpertOnOtherRank(hidden_size, intermediate_size, context=self._context.at(f"experts.{number}"))

    @cached_property
    def _owners(self) -> torch.Tensor:
        """The rank that holds each expert, [X]."""
        sizes = torch.tensor([share.size for share in self._expert_shares], device=self.load.device)
        return torch.arange(self._ranks.size, device=self.load.device).repeat_interleave(sizes)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MixtureOfExperts.forward`."""
        normed, total = norm.add(x, residual)
        routes = self._kernels.route(normed, self.router.packed, self._routing)
        self.count(routes)
        slices = [Share.of(len(x), rank, self._ranks.size) for rank in range(self._ranks.size)]  # of tokens
        owners = self._owners_of_pairs(routes, slices)
        computed = self._expert_outputs(normed, routes, owners, self.adapters_of(adapter_ids))
        expert_outputs = self._exchange(computed, owners, slices)
        mine = slices[self._ranks.rank]
        out = self._kernels.combine_experts(expert_outputs, routes.weights[mine.start : mine.stop])
        return self._show(out), total

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

    def _show(self, out: torch.Tensor) -> torch.Tensor:
        """All-gather the ranks' rows [T, D]."""
        size = self._ranks.size
        return self._ranks.all_to_all(out.repeat(size, 1), [len(out)] * size)[0]
