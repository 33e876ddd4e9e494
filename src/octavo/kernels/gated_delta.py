"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) behind a short convolution: arguments, and the definition.

Both are computed token by token, in the order of the request, and every sum within a token has one order. So a token's
bits depend on the tokens before it alone, not on how steps divide them, nor on where a state was kept.

Legend: T = tokens of the step, R = requests, C = channels: queries, keys and values, one head after the other, G = key
heads, H = value heads, consecutive ones share a key head, K = key size, V = value size, S = tokens that the state of
the convolution holds, D = most drafts of a request.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.recurrence import Heads, read_states, softplus
from octavo.kernels.short_conv import silu
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


def gated_delta(heads: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token of each request: return what its queries read, [R, H, V], and the states behind it.

    The state [R, H, K, V] forgets a part, then the value that it has for the key is moved towards the token's own.
    """
    query, key, value, decay, rate = heads
    key, query = key.unsqueeze(-1), query.unsqueeze(-1)  # [R, H, K, 1]
    decay = decay[..., None]  # [R, H, 1]
    change = (value - decay * (state * key).sum(-2)) * rate[..., None]  # [R, H, V]
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
    inputs = torch.cat((channels, gates), dim=1)
    read = read_states(inputs, weights.conv, None, partial(_heads, weights), gated_delta, states, step)
    normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    return (normed.flatten(1) * silu(out_gates.float())).to(rows.dtype)


def _heads(weights: GatedDeltaWeights, mixed: Tensor, gates: Tensor) -> Heads:
    keys = weights.num_key_heads * weights.key_size
    query, key, value = mixed.split_with_sizes((keys, keys, mixed.shape[1] - 2 * keys), dim=1)
    query, key = (_unit(part.view(len(mixed), weights.num_key_heads, -1)) for part in (query, key))
    shared = weights.num_value_heads // weights.num_key_heads
    query, key = (_shared(part, shared) for part in (query * weights.key_size**-0.5, key))
    beta, forgetting = gates.float().chunk(2, dim=1)
    decay = torch.exp(-weights.decay_rates * softplus(forgetting + weights.dt_bias))
    value = value.view(len(mixed), weights.num_value_heads, -1)
    return Heads(query, key, value, decay, 1.0 / (1.0 + torch.exp(-beta)))


def _shared(x: Tensor, count: int) -> Tensor:
    """Return x [T, G, K] for each value head: [T, G * count, K]."""
    return x.unsqueeze(2).expand(-1, -1, count, -1).flatten(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
