"""Triton's kernels compute what the reference says; a row's bits do not depend on the other rows.

What a wrong kernel looks like is in `tests/kernels/test_against_reference.py`, with the same cases and tolerances.
"""

import functools
from collections.abc import Iterator

import pytest
import torch
from tests.breadth import pick
from tests.kernels.ops import CASES, Case
from tests.kernels.test_against_reference import assert_close
from tests.kernels.triton.device import DEVICE

from octavo.kernels.reference import Kernels
from octavo.kernels.triton.kernels import TritonKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = ("rms_norm", "add_rms_norm", "activate", "mlp", "route", "expert_rows", "combine_experts", "moe")
MOST = pick(18, 34)  # rows, more than a tile of 16; the interpreter takes a millisecond for each


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with torch.device(DEVICE), torch.inference_mode():
        yield


LARGE = ("moe-8-of-40", "route-8-of-128", "rms_norm-of-heads-16x128", "activate-1536")  # slow when interpreted
AGAIN = ("moe-gelu_tanh", "moe-relu2", "mlp-gelu_tanh", "mlp-relu2")  # other ops have these activations
OUR_CASES = [case for case in CASES if case.name.startswith(OPS) and case.name not in pick(LARGE + AGAIN, ())]
# Of activations and norms, which one says nothing about rows; experts have shared ones beside them in another case.
LEFT_OUT = pick(("gelu_tanh", "relu2", "-offset", "-84x37", "-clamped_swiglu", "moe-2-of-5", "-1-of-1"), ())
FEW = [case for case in OUR_CASES if not case.name.endswith(LEFT_OUT)]
WITH_LINEARS = ("mlp", "route", "moe")
named = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.name)


@named(argvalues=OUR_CASES)
@pytest.mark.parametrize("dtype", pick([torch.bfloat16], DTYPES), ids=str)
def test_fast_is_reference(case: Case, dtype: torch.dtype) -> None:
    op = case.make(dtype)
    for rows in (slice(3, 3), *pick((), (slice(0, 1),)), slice(3, MOST)):
        assert_close(op(TritonKernels(), rows), op(Kernels(), rows))


@named(argvalues=[case for case in FEW if not case.name.startswith(WITH_LINEARS)])
def test_rows_are_independent(case: Case) -> None:
    """Of the ops that are ours alone: cuBLAS promises nothing."""
    op = case.make(torch.bfloat16)
    whole = op(TritonKernels(), slice(0, MOST))
    for start, stop in pick(((5, 7),), ((0, 1), (5, 7), (1, 30), (33, 34))):
        assert torch.equal(op(TritonKernels(), slice(start, stop)), whole[start:stop])


@named(argvalues=[case for case in FEW if case.name.startswith(WITH_LINEARS)])
def test_rows_are_independent_where_all_is_ours(case: Case) -> None:
    op = case.make(torch.bfloat16)
    whole = op(TritonKernels(deterministic=True), slice(0, MOST))
    for stop in pick((1,), (1, 7, 33)):
        assert torch.equal(op(TritonKernels(deterministic=True), slice(0, stop)), whole[:stop])
