"""Batch-invariant linear layers: one tiling and one order of summation for any number of rows.

The input is split at fixed places that depend on the weight's shape alone. A split is summed tile by tile, and splits
are added in order. With few rows, each split has a program of its own and a second launch adds them up; with many, one
program does all. Both are the same operations on the same numbers.

Legend: T = rows, K = input size, N = output size, S = splits.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.arguments import aligned

# 64 rows fill an instruction of Hopper's tensor cores. One row wastes 63 of them: 64 operations per byte of weights, of
# the 184 that an H200 can do per byte it reads.
_ROWS, _OUTPUTS, _INPUTS = 64, 128, 64
# For cases that take more registers: float32 (three products of TF32), and rows that are read element by element.
_FEWER_OUTPUTS, _FEWER_INPUTS = 64, 32
_VECTOR = 16  # elements: Triton vectorizes loads where rows begin at multiples of this
_PROGRAMS = 128  # about one per multiprocessor: with fewer, some idle
_JOINED = 1024  # elements per program that adds up splits


@triton.jit
def _split_sum(
    x: tl.tensor,  # [T, K]
    weight: tl.tensor,  # [N, K]
    rows: tl.tensor,
    outputs: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    in_size: tl.tensor,
    start: tl.tensor,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> tl.tensor:
    """Return x @ weight.T over inputs [start, start + SPLIT): [ROWS, OUTPUTS] float32."""
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, SPLIT, INPUTS):
        inputs = start + first + tl.arange(0, INPUTS)
        left_places = x + rows.to(tl.int64)[:, None] * in_size + inputs[None, :]
        right_places = weight + outputs.to(tl.int64)[:, None] * in_size + inputs[None, :]
        left = tl.load(left_places, mask=(rows < num_rows)[:, None] & (inputs < in_size)[None, :], other=0.0)
        right = tl.load(right_places, mask=(outputs < num_outputs)[:, None] & (inputs < in_size)[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="tf32x3")
    return total


@triton.jit
def _finished(
    total: tl.tensor, bias: tl.tensor, outputs: tl.tensor, is_inside: tl.tensor, HAS_BIAS: tl.constexpr
) -> tl.tensor:
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _matmul_kernel(
    x: tl.tensor,  # [T, K]
    weight: tl.tensor,  # [N, K]
    bias: tl.tensor,  # [N]
    out: tl.tensor,  # [T, N]; with SPLIT_APART [S, T, N] float32
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    in_size: tl.tensor,
    SPLITS: tl.constexpr,  # S
    SPLIT: tl.constexpr,
    SPLIT_APART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    places = rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    if SPLIT_APART:
        split = tl.program_id(2)
        total = _split_sum(
            x, weight, rows, outputs, num_rows, num_outputs, in_size, split * SPLIT, SPLIT, ROWS, OUTPUTS, INPUTS
        )
        tl.store(out + split.to(tl.int64) * num_rows * num_outputs + places, total, mask=is_inside)
    else:
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for split in range(SPLITS):
            total += _split_sum(
                x, weight, rows, outputs, num_rows, num_outputs, in_size, split * SPLIT, SPLIT, ROWS, OUTPUTS, INPUTS
            )
        total = _finished(total, bias, outputs[None, :], (outputs < num_outputs)[None, :], HAS_BIAS)
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _join_kernel(
    parts: tl.tensor,  # [S, T, N] float32
    bias: tl.tensor,  # [N]
    out: tl.tensor,  # [T, N]
    size: tl.tensor,  # T * N
    num_outputs: tl.tensor,
    SPLITS: tl.constexpr,  # S
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + size.to(tl.int64) * split + places, mask=is_inside, other=0.0)
    total = _finished(total, bias, places % num_outputs, is_inside, HAS_BIAS)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_inside)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] with weight [N, K] and add bias [N]: [T, N], accumulated in float32."""
    x, weight = aligned(x), aligned(weight)
    (num_rows, in_size), num_outputs = x.shape, len(weight)
    out = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return out
    split = split_size(num_outputs, in_size)
    num_splits = triton.cdiv(in_size, split)
    takes_more = x.dtype == torch.float32 or in_size % _VECTOR
    outputs, inputs = (_FEWER_OUTPUTS, _FEWER_INPUTS) if takes_more else (_OUTPUTS, _INPUTS)
    tiles = triton.cdiv(num_outputs, outputs), triton.cdiv(num_rows, _ROWS)
    is_apart = num_splits > 1 and tiles[0] * tiles[1] < _PROGRAMS
    sums = torch.empty(num_splits, num_rows, num_outputs, dtype=torch.float32, device=x.device) if is_apart else out
    has_bias, given_bias = bias is not None, weight if bias is None else bias  # placeholder address, never read
    _matmul_kernel[(*tiles, num_splits if is_apart else 1)](
        x,
        weight,
        given_bias,
        sums,
        num_rows,
        num_outputs,
        in_size,
        SPLITS=num_splits,
        SPLIT=split,
        SPLIT_APART=is_apart,
        HAS_BIAS=has_bias,
        ROWS=_ROWS,
        OUTPUTS=outputs,
        INPUTS=inputs,
    )
    if is_apart:
        grid = (triton.cdiv(out.numel(), _JOINED),)
        _join_kernel[grid](
            sums, given_bias, out, out.numel(), num_outputs, SPLITS=num_splits, HAS_BIAS=has_bias, BLOCK=_JOINED
        )
    return out


def split_size(num_outputs: int, in_size: int) -> int:
    """Return the inputs per split, such that even one tile of rows yields enough programs to fill a GPU."""
    num_splits = max(1, _PROGRAMS // -(-num_outputs // _OUTPUTS))
    return -(-in_size // (num_splits * 2 * _INPUTS)) * 2 * _INPUTS
