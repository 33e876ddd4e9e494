"""Adapters of each row's own: what the formula says, the same bits in any company, and nothing for other rows."""

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import NATIVE_DTYPES
from tests.kernels.lora import DOWN, GATE_UP, QKV, Shape, adapters_of, formula, random

from octavo.kernels.cpu_float32 import Float32CpuKernels
from octavo.kernels.reference import Kernels

IDS = [3, -1, 0, 2, 3, -1, 0] + [3] * 20 + [1]


def reference(dtype: torch.dtype) -> Kernels:
    """Return the kernels of a machine without a compiler."""
    return Float32CpuKernels() if dtype == torch.float32 else Kernels()


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@each("shape", [QKV, DOWN, GATE_UP])
def test_rows_get_what_their_adapter_adds(shape: Shape, dtype: torch.dtype) -> None:
    kernels = reference(dtype)
    adapters, ids = adapters_of(kernels, shape, dtype), torch.tensor(IDS)
    base, x = random(len(IDS), shape.num_outputs, dtype=dtype), random(len(IDS), shape.in_size, dtype=dtype)
    found = kernels.add_lora(base.clone(), x, adapters, ids)
    expected = formula(base, x, adapters, IDS)
    # The sum is rounded once; its terms are in float32, of size 1 to 10.
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=4e-6)
    assert torch.equal(found[ids < 0], base[ids < 0])
    touched = torch.tensor([slot >= 0 and shape.ranks[slot] > 0 for slot in IDS])
    assert torch.equal(found[~touched], base[~touched])
    assert not torch.isclose(found[touched], base[touched]).all(dim=-1).any()


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@each("shape", [QKV, DOWN, GATE_UP])
def test_a_row_has_its_bits_in_any_company(shape: Shape, dtype: torch.dtype) -> None:
    kernels = reference(dtype)
    adapters, ids = adapters_of(kernels, shape, dtype), torch.tensor(IDS)
    base, x = random(len(IDS), shape.num_outputs, dtype=dtype), random(len(IDS), shape.in_size, dtype=dtype)
    whole = kernels.add_lora(base.clone(), x, adapters, ids)
    for start, stop in [(0, 1), (2, 4), (6, 27), (26, 27), (27, 28), (3, 3)]:
        rows = slice(start, stop)
        assert torch.equal(kernels.add_lora(base[rows].clone(), x[rows], adapters, ids[rows]), whole[rows])
    order = torch.arange(len(IDS)).flip(0)
    assert torch.equal(kernels.add_lora(base[order], x[order], adapters, ids[order]), whole[order])
