"""The activations of MLPs in plain torch: the definition of every `Activation`; and tanh, for soft caps.

Built on exp alone, never torch's sigmoid or tanh: those compute the tail of a thread's range, which fills no vector,
differently, so that the last bit would depend on the number of rows.

Legend: T = tokens, I = intermediate size.
"""

import math

import torch
from torch import Tensor

from octavo.kernels.types import Activation, GeluKind

_GELU_FACTOR, _GELU_CUBIC, _GELU_QUICK = math.sqrt(2.0 / math.pi), 0.044715, 1.702


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Map x float32, [T, 2 * I] with a gate, gates first, else [T, I], to [T, I]."""
    if not activation.is_gated:
        return x.clamp(min=0.0).square()  # relu2 (So et al. 2021, arXiv:2109.08668)
    gate, up = x.chunk(2, dim=-1)  # [T, I] each
    if activation.kind == "silu":  # SwiGLU (Shazeer 2020, arXiv:2002.05202)
        return _swish(gate, 1.0) * up
    if activation.kind == "gelu_tanh":  # GEGLU (same paper), GELU approximated (Hendrycks 2016, arXiv:1606.08415)
        inner = _GELU_FACTOR * (gate + _GELU_CUBIC * gate * gate * gate)
        return _swish_by(gate, 2.0 * inner) * up  # (1 + tanh(a)) / 2 is the sigmoid of 2a
    # clamped_swiglu, as in gpt-oss: gates are bounded above, ups on both sides and shifted by one.
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return _swish(gate, activation.alpha) * (up + 1.0)


def approximate_gelu(x: Tensor, kind: GeluKind) -> Tensor:
    """Map x float32, without a gate (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    In place where it can be: fresh memory costs more than the arithmetic.
    """
    if kind == "quick_gelu":
        powers = x * -_GELU_QUICK
    else:
        powers = (x * x).mul_(_GELU_CUBIC).add_(1.0).mul_(x).mul_(-2.0 * _GELU_FACTOR)
    return x / powers.exp_().add_(1.0)


def hyperbolic_tangent(x: Tensor) -> Tensor:
    """Return tanh(x), to some 1e-7."""
    powers = (x.abs() * -2.0).exp_()
    return ((1.0 - powers) / (1.0 + powers)).copysign_(x)


def _swish(x: Tensor, alpha: float) -> Tensor:
    return _swish_by(x, alpha * x if alpha != 1.0 else x)


def _swish_by(x: Tensor, logits: Tensor) -> Tensor:
    """Return x times the sigmoid of logits."""
    return x / (1.0 + torch.exp(-logits))
