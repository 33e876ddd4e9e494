"""A short convolution along a request, and its use between two gates (LFM2): arguments, and the definition.

A token sees itself and the S tokens before it, in every channel alone. All sums have one order, and inputs are rounded
as the state holds them: a token's bits do not depend on how steps divide a request.

Legend: T = tokens of the step, R = requests, C = channels, S = tokens that the state holds, D = most drafts of a
request, N = rows of requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.states import StateStep, StateTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvWeights:
    """One layer's numbers besides its projections, on this rank."""

    conv: Tensor  # [S + 1, C] float32, that of the earliest token first
    bias: Tensor | None  # [C] float32


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the sum of weight [S + 1, C] times rows, of each row but the first S of window [S + T, C]: float32."""
    wide, num_rows = window.float(), len(window) + 1 - len(weight)
    total = wide[:num_rows] * weight[0]
    for tap in range(1, len(weight)):
        total += wide[tap : tap + num_rows] * weight[tap]
    return total if bias is None else total + bias


def causal_conv(window: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the silu of `convolve`."""
    return silu(convolve(window, weight, bias))


def silu(x: Tensor) -> Tensor:
    """Return x times its sigmoid; torch's own rounds the ends of an array differently."""
    return x / (1.0 + torch.exp(-x))


def short_conv(
    weights: ShortConvWeights,
    rows: Tensor,  # [T, 3 * C]: gates before the convolution, gates behind it, values
    states: StateTensors,  # its log: [N, D, C]
    step: StateStep,
) -> Tensor:  # [T, C]
    """Multiply values by their gates, convolve, multiply by the other gates.

    Writes the states of tokens with slots, and logs drafts. See `StateStep`.
    """
    before, after, values = rows.chunk(3, dim=1)
    inputs = before * values
    if step.has_one_each:
        conv, _ = states.begin_of(step)
        window = torch.cat((conv, inputs.unsqueeze(1)), dim=1)  # [R, S + 1, C]
        mixed = convolve(window.transpose(0, 1), weights.conv.unsqueeze(1), weights.bias)[0]
        states.conv[step.slots] = window[:, 1:]
    else:
        mixed = torch.cat(_one_request_after_another(weights, inputs, states, step))
    return (mixed * after.float()).to(rows.dtype)


def _one_request_after_another(
    weights: ShortConvWeights, inputs: Tensor, states: StateTensors, step: StateStep
) -> list[Tensor]:
    mixed: list[Tensor] = []
    for request in states.requests(inputs, step):
        window = torch.cat((request.conv, request.inputs))  # [S + tokens, C]
        mixed.append(convolve(window, weights.conv, weights.bias)[request.num_again :])
        for token, slot in enumerate(request.slots):
            states.keep(slot, window, token)
    return mixed
