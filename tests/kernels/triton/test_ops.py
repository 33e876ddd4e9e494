"""Triton's kernels compute what the reference says; a row's bits do not depend on the other rows.

What a wrong kernel looks like is in `tests/kernels/test_against_reference.py`, with the same cases and tolerances.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.breadth import pick
from tests.kernels.ops import CASES, Case
from tests.kernels.test_against_reference import assert_close
from tests.kernels.triton.device import DEVICE

from octavo.kernels.reference import Kernels
from octavo.kernels.triton.deterministic import DeterministicKernels
from octavo.kernels.triton.kernels import TritonKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = ("rms_norm", "add_rms_norm", "activate", "mlp", "route", "expert_rows", "combine_experts", "moe")
MOST = 34  # rows; the interpreter takes a millisecond for each


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with torch.device(DEVICE), torch.inference_mode():
        yield


LARGE = ("moe-8-of-40", "route-8-of-128", "rms_norm-of-heads-16x128", "silu_and_mul-1536")  # slow when interpreted
OUR_CASES = [case for case in CASES if case.name.startswith(OPS) and case.name not in pick(LARGE, ())]


@pytest.fixture(params=OUR_CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    case: Case = request.param
    return case


@pytest.mark.parametrize("dtype", pick([torch.bfloat16], DTYPES), ids=str)
def test_fast_is_reference(case: Case, dtype: torch.dtype) -> None:
    op = case.make(dtype)
    for rows in (slice(3, 3), slice(0, 1), slice(3, MOST)):
        assert_close(op(TritonKernels(), rows), op(Kernels(), rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_rows_are_independent(case: Case, dtype: torch.dtype) -> None:
    """Of the ops that are ours alone: cuBLAS promises nothing."""
    if case.name.startswith(("mlp", "route", "moe")):
        pytest.skip("a part of it is cuBLAS's")
    op = case.make(dtype)
    whole = op(TritonKernels(), slice(0, MOST))
    for start, stop in ((0, 1), (5, 7), (1, 30), (33, 34)):
        assert torch.equal(op(TritonKernels(), slice(start, stop)), whole[start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_rows_are_independent_where_all_is_ours(case: Case, dtype: torch.dtype) -> None:
    if not case.name.startswith(("mlp", "route", "moe")):
        pytest.skip("has no map, or none but of experts")
    op = case.make(dtype)
    whole = op(DeterministicKernels(), slice(0, MOST))
    for stop in (1, 7, 33):
        assert torch.equal(op(DeterministicKernels(), slice(0, stop)), whole[:stop])
