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

import torch
from torch import Tensor

from octavo.kernels.short_conv import causal_conv
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
    if step.has_one_each:
        read = _one_token_each(weights, inputs, states, step)
    else:
        read = torch.cat(_one_request_after_another(weights, inputs, states, step))
    result = read.flatten(1)
    if weights.applies_gates:
        wide = gates.float() * weights.gate_scale
        result = result * (wide / (1.0 + torch.exp(-wide)))
    return result.to(rows.dtype)


def _one_token_each(weights: StateSpaceWeights, inputs: Tensor, states: StateTensors, step: StateStep) -> Tensor:
    """Return what tokens read, [T, H, V]: without waiting for a device."""
    conv, matrix = states.begin_of(step)  # [R, S, C], [R, H, K, V]
    channels, steps = inputs[:, : weights.num_channels], inputs[:, weights.num_channels :]
    window = torch.cat((conv, channels.unsqueeze(1)), dim=1)  # [R, S + 1, C]
    mixed = causal_conv(window.transpose(0, 1), weights.conv.unsqueeze(1), weights.conv_bias)[0]
    read, matrix = _token(weights, *_heads(weights, mixed, steps), matrix)
    states.conv[step.slots], states.matrix[step.slots] = window[:, 1:], matrix
    return read


def _one_request_after_another(
    weights: StateSpaceWeights, inputs: Tensor, states: StateTensors, step: StateStep
) -> list[Tensor]:
    reads: list[Tensor] = []
    for request in states.requests(inputs, step):
        channels, steps = request.inputs[:, : weights.num_channels], request.inputs[:, weights.num_channels :]
        window, matrix = torch.cat((request.conv, channels)), request.matrix  # [S + tokens, C]
        heads = _heads(weights, causal_conv(window, weights.conv, weights.conv_bias), steps)
        for token, slot in enumerate(request.slots):
            query, key, value, decay, dt = (part[token : token + 1] for part in heads)
            read, matrix = _token(weights, query, key, value, decay, dt, matrix)
            if token >= request.num_again:
                reads.append(read)
            states.keep(slot, window, token, matrix)
    return reads


def _heads(weights: StateSpaceWeights, mixed: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values by head, what is kept of the state, and how much is taken of values."""
    keys, num_tokens = weights.num_groups * weights.key_size, len(mixed)
    value, key, query = mixed.split_with_sizes((weights.width, keys, keys), dim=1)
    shared = weights.num_heads // weights.num_groups
    query, key = (
        part.view(num_tokens, weights.num_groups, 1, -1).expand(-1, -1, shared, -1).flatten(1, 2)
        for part in (query, key)
    )
    dt = steps.float() * weights.dt_scale + weights.dt_bias
    dt = torch.where(dt > 20.0, dt, torch.log1p(torch.exp(dt.clamp(max=20.0))))  # softplus
    dt = dt.clamp(*weights.dt_limit)
    return query, key, value.view(num_tokens, weights.num_heads, -1), torch.exp(-weights.decay_rates * dt), dt


def _token(
    weights: StateSpaceWeights,
    query: Tensor,  # [R, H, K] float32
    key: Tensor,  # [R, H, K]
    value: Tensor,  # [R, H, V]
    decay: Tensor,  # [R, H]
    dt: Tensor,  # [R, H]
    state: Tensor,  # [R, H, K, V]
) -> tuple[Tensor, Tensor]:
    """Compute one token of each request: return what its queries read, [R, H, V], and the states behind it."""
    change = value * dt[..., None]  # [R, H, V]
    key, query = key.unsqueeze(-1), query.unsqueeze(-1)  # [R, H, K, 1]
    read = decay[..., None] * (state * query).sum(-2) + (query * key).sum(-2) * change
    state = decay[..., None, None] * state + key * change.unsqueeze(-2)
    return read + value * weights.skip[:, None], state


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
        wide = gates.float() * norm.gate_scale
        normed = normed * (wide / (1.0 + torch.exp(-wide)))
    return normed.to(x.dtype)
