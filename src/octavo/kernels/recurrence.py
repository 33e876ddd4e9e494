"""Recurrences behind a short convolution, token by token: what the gated delta rule and Mamba-2 have in common.

Legend: T = tokens of the step, R = requests, C = channels, H = heads, K = key size, V = value size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.short_conv import causal_conv
from octavo.kernels.states import StateStep, StateTensors


class Heads(NamedTuple):
    """What each head has of tokens, in float32."""

    query: Tensor  # [T, H, K]
    key: Tensor  # [T, H, K]
    value: Tensor  # [T, H, V]
    decay: Tensor  # [T, H], what is kept of the state
    rate: Tensor  # [T, H], how much of the value it takes


# Of each token, its channels [T, C] behind the convolution and what else it has [T, any]: its heads.
MakeHeads = Callable[[Tensor, Tensor], Heads]
# Of one token of each request and the states [R, H, K, V]: what its queries read, [R, H, V], and the states behind it.
OneToken = Callable[[Heads, Tensor], tuple[Tensor, Tensor]]


def read_states(
    inputs: Tensor,  # [T, C + any]: what is logged of drafts
    conv: Tensor,  # [S + 1, C] float32
    conv_bias: Tensor | None,  # [C]
    make_heads: MakeHeads,
    one_token: OneToken,
    states: StateTensors,
    step: StateStep,
) -> Tensor:  # [T, H, V]
    """Return what each token reads; write the states of tokens with slots, and log drafts. See `StateStep`."""
    num_channels = conv.shape[1]
    if step.has_one_each:  # all at once, without waiting for a device
        before, matrix = states.begin_of(step)  # [R, S, C], [R, H, K, V]
        window = torch.cat((before, inputs[:, None, :num_channels]), dim=1)  # [R, S + 1, C]
        mixed = causal_conv(window.transpose(0, 1), conv.unsqueeze(1), conv_bias)[0]
        read, matrix = one_token(make_heads(mixed, inputs[:, num_channels:]), matrix)
        states.conv[step.slots], states.matrix[step.slots] = window[:, 1:], matrix
        return read
    reads: list[Tensor] = []
    for request in states.requests(inputs, step):
        window, matrix = torch.cat((request.conv, request.inputs[:, :num_channels])), request.matrix  # [S + tokens, C]
        heads = make_heads(causal_conv(window, conv, conv_bias), request.inputs[:, num_channels:])
        for token, slot in enumerate(request.slots):
            read, matrix = one_token(Heads(*(part[token : token + 1] for part in heads)), matrix)
            if token >= request.num_again:
                reads.append(read)
            states.keep(slot, window, token, matrix)
    return torch.cat(reads)


def softplus(x: Tensor) -> Tensor:
    """Return ln(1 + e^x): x itself where a float32 is no other number."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
