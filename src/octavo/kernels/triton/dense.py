"""Linears with dense weights that sum over inputs in one order: the same bits for a row in any batch, by any tile.

Tensor cores add 16 products at a time, and neither a tile's height nor its width changes which or when: seen on an H200
with every tile below. So tiles are chosen by the number of rows.

Legend: T = rows, K = inputs, N = outputs.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from octavo.kernels.triton.overlap import await_previous, overlap
from octavo.kernels.triton.row_ops import aligned

_FEWEST_FOR_LARGE = 128
_VECTOR = 16  # elements: Triton vectorizes loads where rows begin at multiples of this
_GROUP = 8  # tiles of rows that share weights in the L2 cache
_MANY_OUTPUTS = 4096  # enough programs for every multiprocessor with tiles of 64


@dataclass(frozen=True, slots=True)
class DenseTiling:
    """A program's tile: rows by outputs, and the inputs that it reads at a time."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# Measured on an H200 (benchmarks/results/).
_ROWS_8, _ROWS_16 = DenseTiling(8, 16, 256, 1, 4), DenseTiling(16, 16, 256, 1, 4)
_ROWS_32, _ROWS_32_OF_MANY = DenseTiling(32, 16, 256, 2, 3), DenseTiling(32, 64, 128, 4, 4)
_ROWS_64, _LARGE = DenseTiling(64, 32, 128, 4, 4), DenseTiling(128, 128, 64, 8, 4)
# For float32 (three products of TF32 take more registers), and for rows that are read element by element. One for any
# number of rows: nobody has looked whether its bits depend on the height.
_SMALL = DenseTiling(64, 64, 32, 4, 3)


def tiling_for(num_rows: int, num_outputs: int, in_size: int, dtype: torch.dtype) -> DenseTiling:
    """Return a program's tile."""
    if dtype == torch.float32 or in_size % _VECTOR:
        return _SMALL
    if num_rows <= _ROWS_16.rows:
        return _ROWS_8 if num_rows <= _ROWS_8.rows else _ROWS_16
    if num_rows <= _ROWS_32.rows:
        return _ROWS_32_OF_MANY if num_outputs >= _MANY_OUTPUTS else _ROWS_32
    return _ROWS_64 if num_rows < _FEWEST_FOR_LARGE else _LARGE


# A number of rows that is 1 would be compiled in, and rows with one address are read element by element.
@triton.jit(do_not_specialize=["num_rows"])
def _dense_kernel(
    x: tl.tensor,  # [T, K]
    weight: tl.tensor,  # [N, K]
    bias: tl.tensor | None,  # [N]
    out: tl.tensor,  # [T, N]
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    in_size: tl.tensor,  # K
    IS_EVEN: tl.constexpr,  # K is a multiple of INPUTS
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    await_previous(OVERLAPS)
    num_row_tiles, per_group = tl.cdiv(num_rows, ROWS), GROUP * tl.cdiv(num_outputs, OUTPUTS)
    first_tile = tl.program_id(0) // per_group * GROUP
    in_group = tl.minimum(num_row_tiles - first_tile, GROUP)
    row_tile = first_tile + tl.program_id(0) % per_group % in_group
    outputs = tl.program_id(0) % per_group // in_group * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    here, of_row = tl.minimum(outputs, num_outputs - 1).to(tl.int64), tl.minimum(rows, num_rows - 1).to(tl.int64)
    inputs = tl.arange(0, INPUTS)[None, :]
    x_places, places = x + of_row[:, None] * in_size + inputs, weight + here[:, None] * in_size + inputs
    # Few rows are the narrow side of a product, of which 8 suffice.
    sums = tl.zeros((OUTPUTS, ROWS) if ROWS < 64 else (ROWS, OUTPUTS), tl.float32)
    for first in range(0, in_size, INPUTS):
        if IS_EVEN:
            values, weights = tl.load(x_places + first), tl.load(places + first)
        else:
            is_inside = inputs < in_size - first
            values = tl.load(x_places + first, mask=is_inside, other=0.0)
            weights = tl.load(places + first, mask=is_inside, other=0.0)
        if ROWS < 64:
            sums = tl.dot(weights, tl.trans(values), sums, input_precision="tf32x3")
        else:
            sums = tl.dot(values, tl.trans(weights), sums, input_precision="tf32x3")
    if ROWS < 64:
        sums = tl.trans(sums)
    if bias is not None:
        sums += tl.load(bias + here)[None, :].to(tl.float32)
    is_inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    places = rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_inside)


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: DenseTiling | None = None) -> Tensor:
    """Multiply x [T, K] with weight [N, K] and add bias [N]: [T, N], accumulated in float32; by a tiling of choice."""
    x, weight = aligned(x), aligned(weight)
    (num_rows, in_size), num_outputs = x.shape, len(weight)
    out = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return out
    tiling = tiling or tiling_for(num_rows, num_outputs, in_size, x.dtype)
    _dense_kernel[(triton.cdiv(num_outputs, tiling.outputs) * triton.cdiv(num_rows, tiling.rows),)](
        *(x, weight, bias, out, num_rows, num_outputs, in_size),
        IS_EVEN=in_size % tiling.inputs == 0,
        ROWS=tiling.rows,
        OUTPUTS=tiling.outputs,
        INPUTS=tiling.inputs,
        GROUP=_GROUP,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **overlap(),
    )
    return out
