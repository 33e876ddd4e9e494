"""A row's bits do not depend on the other rows, on its place among them, or on the number of threads."""

import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.conftest import native
from tests.kernels.levels import LEVEL_DTYPES
from tests.kernels.ops import CASES, MAX_ROWS, Case

from octavo.kernels.onednn import Float32CpuKernels, has_onednn
from octavo.kernels.reference import Kernels

needs_onednn = pytest.mark.skipif(not has_onednn(torch.float32), reason="no oneDNN here, so nothing is promised")
THREADS = pick([1, 3], [1, 2, 3])
SIZES = (1, 2, 3, 5, 7, 8, 10, 15, 16, 17, 31, 64, 100, 129, 255)
# By default not every size at every start: each start meets sizes below, at and above those of tiles.
SPANS = [(size, start) for at, size in enumerate(SIZES) for start in pick([(0, 1, 43)[at % 3]], [0, 1, 43])]


def rows_that_differ(kernels: Kernels, case: Case, dtype: torch.dtype = torch.float32) -> list[tuple[int, int]]:
    """Return the (first row, number of rows) that give other bits than all rows at once."""
    op = case.make(dtype)
    with torch.inference_mode():
        whole = op(kernels, slice(0, MAX_ROWS))
        return [
            (start, size)
            for size, start in SPANS
            if not torch.equal(op(kernels, slice(start, start + size)), whole[start : start + size])
        ]


@needs_onednn
@each("num_threads", pick([3], THREADS))
@each("case", CASES)
def test_float32_rows_are_independent(case: Case, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    assert rows_that_differ(Float32CpuKernels(), case) == []


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@each("case", CASES)
def test_native_rows_are_independent(case: Case, level: str, dtype: torch.dtype) -> None:
    assert rows_that_differ(native(level, 2, dtype), case, dtype) == []


@needs_onednn
@each("case", CASES)
def test_threads_do_not_show(case: Case) -> None:
    op, results = case.make(torch.float32), []
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        with torch.inference_mode():
            results.append(op(Float32CpuKernels(), slice(0, MAX_ROWS)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@each("case", CASES)
def test_native_threads_do_not_show(case: Case, level: str, dtype: torch.dtype) -> None:
    op = case.make(dtype)
    with torch.inference_mode():
        results = [op(native(level, num_threads, dtype), slice(0, MAX_ROWS)) for num_threads in THREADS]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
@each(("num_outputs", "in_size"), [(1094, 2080), (200, 1024)])
def test_many_native_rows_are_those_of_few(num_outputs: int, in_size: int, level: str, dtype: torch.dtype) -> None:
    """Several blocks of rows, of k and of panels, the last of each not full: finished beside the products of others."""
    source, kernels = torch.Generator().manual_seed(in_size), native(level, 2, dtype)
    x = torch.randn(600, in_size, generator=source).to(dtype)
    packed = kernels.pack_linear(torch.randn(num_outputs, in_size, generator=source).to(dtype), None)
    whole = kernels.linear(x, packed)
    for start in (0, 15, 288, 304, 511, 599):
        assert torch.equal(kernels.linear(x[start : start + 1], packed), whole[start : start + 1])


@needs_onednn
def test_the_check_notices_plain_torch() -> None:
    """The reference does not promise it, and this is how that looks."""
    [case] = [case for case in CASES if case.name == "linear-256x2048"]
    assert rows_that_differ(Kernels(), case)
