"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) behind a short convolution: arguments, and the definition.

Both are computed token by token, in the order of the request, and every sum within a token has one order. So a token's
bits depend on the tokens before it alone, not on how steps divide them, nor on where a state was kept.

Legend: T = tokens of the step, R = requests, C = channels: queries, keys and values, one head after the other, G = key
heads, H = value heads, consecutive ones share a key head, K = key size, V = value size, S = tokens that the state of
the convolution holds, D = most drafts of a request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.short_conv import causal_conv
from octavo.kernels.states import StateStep, StateTensors

_L2_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaWeights:
    """One layer's numbers besides its projections, on this rank."""

    num_key_heads: int  # G
    num_value_heads: int  # H
    key_size: int  # K
    value_size: int  # V
    conv: Tensor  # [S + 1, C] float32, that of the earliest token first
    decay_rates: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32
    norm: Tensor  # [V] float32, shared by all heads
    eps: float

    @property
    def num_channels(self) -> int:
        """Return C."""
        return self.conv.shape[1]


def gated_delta(
    query: Tensor,  # [R, H, K] float32
    key: Tensor,  # [R, H, K]
    value: Tensor,  # [R, H, V]
    decay: Tensor,  # [R, H]
    beta: Tensor,  # [R, H]
    state: Tensor,  # [R, H, K, V]
) -> tuple[Tensor, Tensor]:
    """Compute one token of each request: return what its queries read, [R, H, V], and the states behind it.

    The state forgets a part, then the value that it has for the key is moved towards the token's own by `beta`.
    """
    key, query = key.unsqueeze(-1), query.unsqueeze(-1)  # [R, H, K, 1]
    decay = decay[..., None]  # [R, H, 1]
    change = (value - decay * (state * key).sum(-2)) * beta[..., None]  # [R, H, V]
    read = decay * (state * query).sum(-2) + (query * key).sum(-2) * change
    return read, decay.unsqueeze(-1) * state + key * change.unsqueeze(-2)


def gated_delta_net(
    weights: GatedDeltaWeights,
    rows: Tensor,  # [T, C + H * V]: channels, then the gates of the result
    gates: Tensor,  # [T, 2 * H]: how far values are moved, and how much is forgotten
    states: StateTensors,
    step: StateStep,
) -> Tensor:  # [T, H * V]
    """Convolve, apply the gated delta rule, normalize each head's result and multiply it by the silu of its gate.

    Writes the states of tokens with slots, and logs drafts. See `StateStep`.
    """
    channels, out_gates = rows.split_with_sizes((weights.num_channels, rows.shape[1] - weights.num_channels), dim=1)
    if step.has_one_each:
        read = _one_token_each(weights, channels, gates, states, step)
    else:
        read = _one_request_after_another(weights, channels, gates, states, step)
    normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    wide = out_gates.float()
    return (normed.flatten(1) * (wide / (1.0 + torch.exp(-wide)))).to(rows.dtype)


def _one_token_each(
    weights: GatedDeltaWeights, channels: Tensor, gates: Tensor, states: StateTensors, step: StateStep
) -> Tensor:
    """Return what tokens read, [T, H, V]: without waiting for a device."""
    conv, matrix = states.begin_of(step)  # [R, S, C], [R, H, K, V]
    window = torch.cat((conv, channels.unsqueeze(1)), dim=1)  # [R, S + 1, C]
    mixed = causal_conv(window.transpose(0, 1), weights.conv.unsqueeze(1))[0]
    read, matrix = gated_delta(*_heads(weights, mixed, gates), matrix)
    states.conv[step.slots], states.matrix[step.slots] = window[:, 1:], matrix
    return read


def _one_request_after_another(
    weights: GatedDeltaWeights, channels: Tensor, gates: Tensor, states: StateTensors, step: StateStep
) -> Tensor:
    reads: list[Tensor] = []
    for request in states.requests(torch.cat((channels, gates), dim=1), step):
        its_channels, its_gates = request.inputs[:, : weights.num_channels], request.inputs[:, weights.num_channels :]
        window, matrix = torch.cat((request.conv, its_channels)), request.matrix  # [S + tokens, C]
        heads = _heads(weights, causal_conv(window, weights.conv), its_gates)
        for token, slot in enumerate(request.slots):
            query, key, value, decay, beta = (part[token : token + 1] for part in heads)
            read, matrix = gated_delta(query, key, value, decay, beta, matrix)
            if token >= request.num_again:
                reads.append(read)
            states.keep(slot, window, token, matrix)
    return torch.cat(reads)


def _heads(weights: GatedDeltaWeights, mixed: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values by value head, what is kept of the state, and how far values are moved."""
    keys = weights.num_key_heads * weights.key_size
    query, key, value = mixed.split_with_sizes((keys, keys, mixed.shape[1] - 2 * keys), dim=1)
    query, key = (_unit(part.view(len(mixed), weights.num_key_heads, -1)) for part in (query, key))
    shared = weights.num_value_heads // weights.num_key_heads
    query, key = (_shared(part, shared) for part in (query * weights.key_size**-0.5, key))
    beta, forgetting = gates.float().chunk(2, dim=1)
    steps = forgetting + weights.dt_bias
    steps = torch.where(steps > 20.0, steps, torch.log1p(torch.exp(steps.clamp(max=20.0))))  # softplus
    decay = torch.exp(-weights.decay_rates * steps)
    return query, key, value.view(len(mixed), weights.num_value_heads, -1), decay, 1.0 / (1.0 + torch.exp(-beta))


def _shared(x: Tensor, count: int) -> Tensor:
    """Return x [T, G, K] for each value head: [T, G * count, K]."""
    return x.unsqueeze(2).expand(-1, -1, count, -1).flatten(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
