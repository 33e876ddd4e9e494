"""Ops on rows, one or more programs each: the activations of MLPs, and RMS norm with the residual addition.

Legend: T = rows, I = intermediate size, D = size normalized over.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.overlap import await_previous, overlap
from octavo.kernels.types import Activation, Fused

_ALIGNMENT = 16  # bytes: aligned addresses get a compiled variant of their own
_BLOCK = tl.constexpr(1024)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy of it aligned to 16 bytes.

    Triton specializes kernels on alignment, which changes how a row is spread over threads and so the order of a sum: a
    row's bits must not depend on where its tensor happens to begin.
    """
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def warps_of_row(block: int) -> int:
    """Return the warps of a program that reduces a row. They decide the order of the sum."""
    return min(16, max(1, block // 512))


@triton.jit
def _swish(x: tl.tensor, logits: tl.tensor) -> tl.tensor:
    """Return x times the sigmoid of logits, which are capped where exp would overflow."""
    return x / (1.0 + tl.exp(-tl.where(logits < -87.0, -87.0, logits)))


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Apply a gated activation in float32."""
    if ACTIVATION.kind == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = _swish(gate, 2.0 * inner) * up
    elif ACTIVATION.kind == "clamped_swiglu":
        limit: tl.constexpr = ACTIVATION.limit
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = _swish(gate, ACTIVATION.alpha * gate) * (up + 1.0)
    elif ACTIVATION.kind == "scaled_silu":
        gate = ACTIVATION.alpha * gate
        result = _swish(gate, gate) * up
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    return result


@triton.jit
def ungated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Apply an activation without a gate in float32: relu(x)^2, where NaN stays, or GELU."""
    if ACTIVATION.kind == "plain_gelu":
        result = _swish(x, 2.0 * (0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        result = positive * positive
    return result


@triton.jit
def _activate_kernel(
    x: tl.tensor,  # [T, 2 * I] with a gate, else [T, I]
    out: tl.tensor,  # [T, I]
    size: tl.tensor,  # I
    ACTIVATION: tl.constexpr,  # Activation
    OVERLAPS: tl.constexpr,
) -> None:
    await_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    is_inside = columns < size
    if not ACTIVATION.is_gated:
        alone = tl.load(x + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
        result = ungated(alone, ACTIVATION)
    else:
        places = x + row * 2 * size + columns
        gate = tl.load(places, mask=is_inside, other=0.0).to(tl.float32)
        up = tl.load(places + size, mask=is_inside, other=0.0).to(tl.float32)
        result = gated(gate, up, ACTIVATION)
    tl.store(out + row * size + columns, result.to(out.dtype.element_ty), mask=is_inside)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the activation to x: [T, 2 * I] if gated, gates first, else [T, I]; returns [T, I]."""
    x, size = aligned(x), x.shape[1] // (1 + activation.is_gated)
    out = x.new_empty(len(x), size)
    grid = len(x), triton.cdiv(size, _BLOCK.value)
    _activate_kernel[grid](x, out, size, ACTIVATION=activation, enable_fp_fusion=False, **overlap())
    return out


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,  # [T, D]
    residual: tl.tensor | None,  # [T, D]
    weight: tl.tensor,  # [D]
    out: tl.tensor,  # [T, D]
    total: tl.tensor | None,  # [T, D]
    bias: tl.tensor | None,  # [D], of a layer norm
    eps: tl.tensor,
    OFFSET: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program per row."""
    await_previous(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    row = tl.load(x + places, mask=is_inside, other=0.0)
    if residual is not None:
        # Rounded to the dtype, as later layers read it; the norm is taken of the rounded sum.
        row = (row.to(tl.float32) + tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + places, row, mask=is_inside)
    wide = row.to(tl.float32)
    if IS_CENTERED:
        wide = tl.where(is_inside, wide - tl.sum(wide, axis=0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    factors = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        factors += OFFSET
    normed = wide * scale * factors
    if bias is not None:
        normed += tl.load(bias + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + places, normed.to(row.dtype), mask=is_inside)


def add_rms_norm(x: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
    """Return (normalized x + residual, x + residual), each [..., D]; without a residual the sum is x itself."""
    x, size, residual = aligned(x), x.shape[-1], fused.residual
    out, total = torch.empty_like(x), None
    if residual is not None:
        residual, total = aligned(residual), torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(x.numel() // size,)](
        *(x, residual, fused.norm_weight, out, total, fused.norm_bias, fused.eps),
        OFFSET=fused.norm_offset,
        IS_CENTERED=fused.is_centered,
        SIZE=size,
        BLOCK=block,
        num_warps=warps_of_row(block),
        enable_fp_fusion=False,
        **overlap(),
    )
    return out, x if total is None else total
