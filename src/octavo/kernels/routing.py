"""How a token's router logits become its experts and their weights: the definition, in plain torch.

exp is the only transcendental function, as in all of `kernels/reference.py`: torch's sigmoid and softmax may compute
the ends of an array otherwise than its middle.

Legend: T = tokens, X = experts, C = experts per token, G = groups of experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.types import Routes, Routing


def choose_experts(logits: Tensor, routing: Routing) -> Routes:
    """Choose by logits [T, X], or [T, X + 1] with a gated shared expert, float32; of ties, the lower index."""
    of_choice, rule = logits[:, : routing.num_experts], routing.rule
    if rule.chooses_by_logit:
        chosen, ids = _best(of_choice, routing.top_k)
        powers = torch.exp(chosen - chosen[:, :1])
        all_powers = powers if routing.renormalizes else torch.exp(of_choice - chosen[:, :1])
        weights = powers / all_powers.sum(-1, keepdim=True)
    else:
        scores = _scores(of_choice, is_softmax=rule.scores == "softmax")
        ids = _best(_candidates(scores, routing), routing.top_k)[1]
        weights = scores.gather(1, ids)
        if routing.renormalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    if routing.has_shared:
        ids = F.pad(ids, (0, 1), value=routing.num_experts)
        gate = 1.0 / (1.0 + torch.exp(-logits[:, routing.num_experts :])) if rule.gates_shared else None
        weights = F.pad(weights, (0, 1), value=1.0) if gate is None else torch.cat((weights, gate), dim=-1)
    return Routes(expert_ids=ids, weights=weights)


def _best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of values [T, X], in descending order, and their indices."""
    ranked, order = values.sort(dim=-1, descending=True, stable=True)
    return ranked[:, :count], order[:, :count]


def _scores(logits: Tensor, *, is_softmax: bool) -> Tensor:
    """Return the score of each expert [T, X]: its share of all, or its own sigmoid."""
    if not is_softmax:
        return 1.0 / (1.0 + torch.exp(-logits))
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def _candidates(scores: Tensor, routing: Routing) -> Tensor:
    """Return what experts are chosen by [T, X]: corrected scores, -inf in groups that are not among the best."""
    rule = routing.rule
    if routing.correction is not None:
        scores = scores + routing.correction
    if rule.num_groups == 1:
        return scores
    groups = scores.view(len(scores), rule.num_groups, routing.num_experts // rule.num_groups)  # [T, G, X / G]
    best = groups.sort(dim=-1, descending=True).values
    of_groups = best[:, :, 0] if rule.group_best == 1 else best[:, :, 0] + best[:, :, 1]  # [T, G]
    is_hidden = torch.ones_like(of_groups, dtype=torch.bool)
    is_hidden.scatter_(1, _best(of_groups, rule.top_groups)[1], value=False)
    return groups.masked_fill(is_hidden.unsqueeze(-1), -torch.inf).flatten(1)
