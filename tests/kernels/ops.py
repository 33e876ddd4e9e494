"""Each op as a case: how to call it with made-up arguments of a given number of rows, in odd sizes.

Legend: T = tokens (rows), K = input size, N = output size, D = hidden or head size, H = heads, I = intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.kernels.dispatch import Kernels

MOST_ROWS = 300
Op = Callable[[Kernels, slice], torch.Tensor]  # computes the rows of the slice


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op with arguments."""

    name: str
    make: Callable[[torch.dtype], Op]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _linear(num_outputs: int, in_size: int, *, has_bias: bool) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MOST_ROWS, in_size, dtype=dtype), _random(num_outputs, in_size, dtype=dtype)
        bias = _random(num_outputs, dtype=dtype) if has_bias else None
        scaled = weight * in_size**-0.5  # results of size 1
        return lambda kernels, rows: kernels.linear(x[rows], kernels.pack_linear(scaled, bias))

    return make


def _logits_linear(num_outputs: int, in_size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MOST_ROWS, in_size, dtype=dtype), _random(num_outputs, in_size, dtype=dtype)
        scaled = weight * in_size**-0.5
        # Rounded to the dtype: kernels may round before they widen, or not.
        return lambda kernels, rows: kernels.logits_linear(x[rows], kernels.pack_linear(scaled, None)).to(dtype)

    return make


def _gated_linear(size: int, in_size: int, *, has_bias: bool) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MOST_ROWS, in_size, dtype=dtype), _random(2 * size, in_size, dtype=dtype)
        bias = _random(2 * size, dtype=dtype) if has_bias else None
        scaled = weight * in_size**-0.5
        return lambda kernels, rows: kernels.gated_linear(x[rows], kernels.pack_gated_linear(scaled, bias))

    return make


def _normed_linear(num_outputs: int, in_size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MOST_ROWS, in_size, dtype=dtype), _random(MOST_ROWS, in_size, dtype=dtype).flip(0)
        norm, weight = _random(in_size, dtype=dtype), _random(num_outputs, in_size, dtype=dtype) * in_size**-0.5
        return lambda kernels, rows: torch.cat(
            kernels.normed_linear(x[rows], residual[rows], norm, 1e-5, kernels.pack_linear(weight, None)), dim=-1
        )

    return make


def _gated_mlp(size: int, middle_size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MOST_ROWS, size, dtype=dtype), _random(MOST_ROWS, size, dtype=dtype).flip(0)
        gate_up = _random(2 * middle_size, size, dtype=dtype) * size**-0.5
        down = _random(size, middle_size, dtype=dtype) * middle_size**-0.5
        norm = _random(size, dtype=dtype)

        def compute(kernels: Kernels, rows: slice) -> torch.Tensor:
            maps = kernels.pack_gated_linear(gate_up, None), kernels.pack_linear(down, None)
            return torch.cat(kernels.gated_mlp(x[rows], residual[rows], norm, 1e-5, *maps), dim=-1)

        return compute

    return make


def _rms_norm(size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, weight = _random(MOST_ROWS, size, dtype=dtype), _random(size, dtype=dtype)
        return lambda kernels, rows: kernels.rms_norm(x[rows], weight, 1e-6)

    return make


def _rms_norm_of_heads(num_heads: int, size: int) -> Callable[[torch.dtype], Op]:
    """As a model does it: the heads are a slice of a wider projection."""

    def make(dtype: torch.dtype) -> Op:
        wide, weight = _random(MOST_ROWS, 2 * num_heads * size, dtype=dtype), _random(size, dtype=dtype)
        heads = wide[:, : num_heads * size].unflatten(1, (num_heads, size))  # type: ignore[no-untyped-call]
        return lambda kernels, rows: kernels.rms_norm(heads[rows], weight, 1e-6)

    return make


def _add_rms_norm(size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        x, residual = _random(MOST_ROWS, size, dtype=dtype), _random(MOST_ROWS, size, dtype=dtype).flip(0)
        weight = _random(size, dtype=dtype)
        return lambda kernels, rows: torch.cat(kernels.add_rms_norm(x[rows], residual[rows], weight, 1e-5), dim=-1)

    return make


def _silu_and_mul(size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        gate_up = 3 * _random(MOST_ROWS, 2 * size, dtype=dtype)
        return lambda kernels, rows: kernels.silu_and_mul(gate_up[rows])

    return make


def _rotary(num_heads: int, size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        wide, angles = _random(MOST_ROWS, num_heads + 3, size, dtype=dtype), 9 * _random(MOST_ROWS, size // 2)
        cos, sin = angles.cos(), angles.sin()
        return lambda kernels, rows: kernels.rotary(wide[rows, :num_heads], cos[rows], sin[rows])

    return make


def _embedding(size: int) -> Callable[[torch.dtype], Op]:
    def make(dtype: torch.dtype) -> Op:
        table, ids = _random(50, size, dtype=dtype), torch.arange(MOST_ROWS) * 7 % 50
        return lambda kernels, rows: kernels.embedding(ids[rows], table)

    return make


CASES = [
    Case(name="linear-37x84", make=_linear(37, 84, has_bias=True)),
    Case(name="linear-84x100", make=_linear(84, 100, has_bias=False)),
    Case(name="linear-1x3", make=_linear(1, 3, has_bias=True)),
    Case(name="linear-512x64", make=_linear(512, 64, has_bias=False)),
    Case(name="linear-256x2048", make=_linear(256, 2048, has_bias=True)),
    Case(name="linear-900x1000", make=_linear(900, 1000, has_bias=False)),
    Case(name="logits_linear-300x64", make=_logits_linear(300, 64)),
    Case(name="gated_linear-37x84", make=_gated_linear(37, 84, has_bias=True)),
    Case(name="gated_linear-96x100", make=_gated_linear(96, 100, has_bias=False)),
    Case(name="normed_linear-100x84", make=_normed_linear(100, 84)),
    Case(name="gated_mlp-84x37", make=_gated_mlp(84, 37)),
    Case(name="gated_mlp-64x200", make=_gated_mlp(64, 200)),
    Case(name="rms_norm-37", make=_rms_norm(37)),
    Case(name="rms_norm-1024", make=_rms_norm(1024)),
    Case(name="rms_norm-of-heads-16x128", make=_rms_norm_of_heads(16, 128)),
    Case(name="rms_norm-of-heads-3x20", make=_rms_norm_of_heads(3, 20)),
    Case(name="add_rms_norm-100", make=_add_rms_norm(100)),
    Case(name="silu_and_mul-100", make=_silu_and_mul(100)),
    Case(name="silu_and_mul-37", make=_silu_and_mul(37)),
    Case(name="silu_and_mul-1536", make=_silu_and_mul(1536)),
    Case(name="rotary-16x128", make=_rotary(16, 128)),
    Case(name="rotary-3x20", make=_rotary(3, 20)),
    Case(name="embedding-84", make=_embedding(84)),
]
