"""Expert parallel: whole experts are dealt to the ranks that share a layer, and answers travel instead of sums.

All these ranks have all tokens of the step, as attention leaves them. So each routes all of them, which costs less than
telling the others, and computes for its own experts; and everyone knows what everyone will send. Then the tokens are
dealt out in slices: each rank gets the answers for its slice, adds them up as one rank would, and shows the others. A
shared expert is on all ranks, and computed for a rank's own slice.

Legend: T = tokens, D = hidden size, X = experts, C = experts that a token chooses, R = pairs of a token and an expert.
"""

from dataclasses import replace
from functools import cached_property

import torch

from octavo.config.model import MoEConfig
from octavo.distributed.groups import ParallelGroups
from octavo.distributed.shares import Share
from octavo.kernels.dispatch import Routes
from octavo.layers.context import BuildContext
from octavo.layers.moe import Expert, ExpertElsewhere, MixtureOfExperts
from octavo.layers.norm import RMSNorm


class DealtExperts(MixtureOfExperts):
    """A mixture dealt to the ranks of `context.groups.experts`. A token's bits are those of one rank."""

    is_recordable = False  # who gets how many rows is known when tokens have chosen

    def __init__(self, layer: int, hidden_size: int, moe: MoEConfig, *, context: BuildContext) -> None:
        self._ranks = context.groups.experts
        self._dealt = [Share.of(moe.num_experts, rank, self._ranks.size) for rank in range(self._ranks.size)]
        # Experts are whole, so what is inside them knows of no other rank.
        super().__init__(layer, hidden_size, moe, context=replace(context, groups=ParallelGroups()))

    def build_expert(self, number: int, hidden_size: int, intermediate_size: int) -> Expert | ExpertElsewhere:
        """See `MixtureOfExperts.build_expert`."""
        held = self._dealt[self._ranks.rank]
        if held.start <= number < held.stop:
            return super().build_expert(number, hidden_size, intermediate_size)
        return ExpertElsewhere(hidden_size, intermediate_size, context=self._context.at(f"experts.{number}"))

    @cached_property
    def _owners(self) -> torch.Tensor:
        """The rank that holds each expert, [X]."""
        sizes = torch.tensor([share.size for share in self._dealt], device=self.load.device)
        return torch.arange(self._ranks.size, device=self.load.device).repeat_interleave(sizes)

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MixtureOfExperts.forward`."""
        normed, total = norm.add(x, residual)
        routes = self._kernels.route(normed, self.router.packed, self._routing)
        self.count(routes)
        slices = [Share.of(len(x), rank, self._ranks.size) for rank in range(self._ranks.size)]  # of tokens
        owners = self._owners_of_pairs(routes, slices)
        answers = self._exchange(self._answers(normed, routes, owners), owners, slices)
        mine = slices[self._ranks.rank]
        out = self._kernels.combine_experts(answers, routes.weights[mine.start : mine.stop])
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

    def _answers(self, normed: torch.Tensor, routes: Routes, owners: torch.Tensor) -> torch.Tensor:
        """Compute this rank's pairs [R, D], in the order of tokens."""
        held = self._dealt[self._ranks.rank]
        token_ids, choices = (owners == self._ranks.rank).nonzero().unbind(1)  # [R] each
        expert_ids = routes.expert_ids[token_ids, choices]
        is_shared = expert_ids == self._routing.num_experts
        local_ids = torch.where(is_shared, held.size, expert_ids - held.start)
        return self._kernels.expert_rows(normed, token_ids, local_ids, self.packed)

    def _exchange(self, answers: torch.Tensor, owners: torch.Tensor, slices: list[Share]) -> torch.Tensor:
        """Send answers [R, D] to those who add them up; return those for this rank's tokens, [T, C, D]."""
        counts = [int((owners[to.start : to.stop] == self._ranks.rank).sum()) for to in slices]
        came, _ = self._ranks.all_to_all(answers, counts)
        mine = slices[self._ranks.rank]
        places = owners[mine.start : mine.stop].flatten().argsort(stable=True)  # of what came, rank by rank
        in_order = torch.empty_like(came)
        in_order[places] = came
        return in_order.view(mine.size, owners.shape[1], answers.shape[1])

    def _show(self, out: torch.Tensor) -> torch.Tensor:
        """Give this rank's rows [T, D] to all; return everyone's."""
        size = self._ranks.size
        return self._ranks.all_to_all(out.repeat(size, 1), [len(out)] * size)[0]
