"""Mamba-2's state space (Dao and Gu 2024, arXiv:2405.21060) behind a short convolution, and the norm behind it.

Computed token by token, in the order of the request, and every sum within a token has one order. So a token's bits
depend on the tokens before it alone, not on how steps divide them, nor on where a state was kept.

Legend: T = tokens of the step, R = requests, C = channels: values of all heads, then keys and queries of all groups,
G = groups, H = heads, consecutive ones are in a group, K = key size, V = value size, W = H * V, S = tokens that the
state of the convolution holds, D = most drafts of a request, N = rows of requests. In the paper, x are values, B keys,
C queries.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.recurrence import Heads, read_states, softplus
from octavo.kernels.short_conv import silu
from octavo.kernels.states import StateStep, StateTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpaceWeights:
    """One layer's numbers besides its projections, on this rank."""

    num_groups: int  # G
    num_heads: int  # H
    key_size: int  # K
    value_size: int  # V
    conv: Tensor  # [S + 1, C] float32, that of the earliest token first
    conv_bias: Tensor | None  # [C] float32
    decay_rates: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32
    skip: Tensor  # [H] float32: what part of its values a head adds to what it reads
    dt_limit: tuple[float, float] = (0.0, math.inf)
    dt_scale: float = 1.0  # of what is projected, before the bias
    gate_scale: float = 1.0
    applies_gates: bool = True  # the result is multiplied by the silu of its gates

    @property
    def width(self) -> int:
        """Return W."""
        return self.num_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Return C."""
        return self.conv.shape[1]


def state_space(
    weights: StateSpaceWeights,
    rows: Tensor,  # [T, W + C + H]: gates of the result, channels, how far each head steps
    states: StateTensors,  # its log: [N, D, C + H]
    step: StateStep,
) -> Tensor:  # [T, W]
    """Convolve; of each token the state forgets a part and takes the values under the keys, then queries read it.

    Writes the states of tokens with slots, and logs drafts. See `StateStep`.
    """
    gates, inputs = rows[:, : weights.width], rows[:, weights.width :]
    heads, one_token = partial(_heads, weights), partial(_token, weights.skip)
    result = read_states(inputs, weights.conv, weights.conv_bias, heads, one_token, states, step).flatten(1)
    if weights.applies_gates:
        result = result * silu(gates.float() * weights.gate_scale)
    return result.to(rows.dtype)


def _heads(weights: StateSpaceWeights, mixed: Tensor, steps: Tensor) -> Heads:
    keys, num_tokens = weights.num_groups * weights.key_size, len(mixed)
    value, key, query = mixed.split_with_sizes((weights.width, keys, keys), dim=1)
    shared = weights.num_heads // weights.num_groups
    query, key = (
        part.view(num_tokens, weights.num_groups, 1, -1).expand(-1, -1, shared, -1).flatten(1, 2)
        for part in (query, key)
    )
    dt = softplus(steps.float() * weights.dt_scale + weights.dt_bias)
    dt = dt.clamp(*weights.dt_limit)
    value = value.view(num_tokens, weights.num_heads, -1)
    return Heads(query, key, value, torch.exp(-weights.decay_rates * dt), dt)


def _token(skip: Tensor, heads: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token of each request: return what its queries read, [R, H, V], and the states behind it."""
    query, key, value, decay, dt = heads
    change = value * dt[..., None]  # [R, H, V]
    key, query = key.unsqueeze(-1), query.unsqueeze(-1)  # [R, H, K, 1]
    read = decay[..., None] * (state * query).sum(-2) + (query * key).sum(-2) * change
    state = decay[..., None, None] * state + key * change.unsqueeze(-2)
    return read + value * skip[:, None], state


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNorm:
    """The norm of groups of columns; `first` and `width` are this rank's columns of all."""

    weight: Tensor  # [width] float32
    eps: float
    group_size: int  # columns of a group
    num_groups: int  # of all ranks
    first: int = 0
    gate_scale: float = 1.0

    @property
    def width(self) -> int:
        return len(self.weight)

    @property
    def groups(self) -> list[tuple[int, int, int]]:
        """The groups of these columns: number, and where its columns begin and end among them."""
        found, column = [], 0
        while column < self.width:
            group = (self.first + column) // self.group_size
            end = min(self.width, (group + 1) * self.group_size - self.first)
            found.append((group, column, end))
            column = end
        return found


def group_sums(x: Tensor, norm: GroupNorm) -> Tensor:
    """Return the sum of squares of each group's columns of x [T, W]: [T, groups of all ranks] float32."""
    sums = x.new_zeros(len(x), norm.num_groups, dtype=torch.float32)
    for group, start, end in norm.groups:
        sums[:, group] = x[:, start:end].float().square().sum(-1)
    return sums


def norm_groups(x: Tensor, norm: GroupNorm, gates: Tensor | None, sums: Tensor | None) -> Tensor:
    """Divide each group's columns of x [T, W] by their root mean square; multiply by weights, and silu(gates) [T, W].

    `sums` are `group_sums` of all ranks; None: this rank has all columns of its groups.
    """
    sums = group_sums(x, norm) if sums is None else sums
    scales = torch.rsqrt(sums / norm.group_size + norm.eps)
    parts = [x[:, start:end].float() * scales[:, group, None] for group, start, end in norm.groups]
    normed = torch.cat(parts, dim=1) * norm.weight
    if gates is not None:
        normed = normed * silu(gates.float() * norm.gate_scale)
    return normed.to(x.dtype)
