"""Adapters of each row's own: what the formula says, the same bits in any company, and nothing for other rows."""

import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.conftest import native
from tests.kernels.levels import DTYPES, LEVEL_DTYPES
from tests.kernels.lora import DOWN, GATE_UP, QKV, Shape, adapters_of, formula, random

from octavo.kernels.native import NativeKernels
from octavo.kernels.onednn import Float32CpuKernels
from octavo.kernels.reference import Kernels

NAME_DTYPES = [*(("reference", dtype) for dtype in DTYPES), *LEVEL_DTYPES]
SHAPES = [QKV, DOWN, GATE_UP]
IDS = [3, -1, 0, 2, 3, -1, 0] + [3] * 20 + [1] * 70  # more rows of one adapter than a block has


def kernels_of(name: str, dtype: torch.dtype, num_threads: int = 2) -> Kernels:
    """Return the kernels of a level, or those of a machine without a compiler."""
    if name != "reference":
        return native(name, num_threads, dtype)
    return Float32CpuKernels() if dtype == torch.float32 else Kernels()


def inputs_of(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return random(len(IDS), shape.num_outputs, dtype=dtype), random(len(IDS), shape.in_size, dtype=dtype)


@pytest.mark.parametrize(("name", "dtype"), NAME_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_get_what_their_adapter_adds(shape: Shape, name: str, dtype: torch.dtype) -> None:
    kernels, ids = kernels_of(name, dtype), torch.tensor(IDS)
    adapters, (base, x) = adapters_of(kernels, shape, dtype), inputs_of(shape, dtype)
    found = kernels.add_lora(base.clone(), x, adapters, ids)
    expected = formula(base, x, adapters, IDS)
    # The sum is rounded once; its terms are in float32, of size 1 to 10.
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=4e-6)
    touched = torch.tensor([slot >= 0 and shape.ranks[slot] > 0 for slot in IDS])
    assert torch.equal(found[~touched], base[~touched])
    assert not torch.isclose(found[touched], base[touched]).all(dim=-1).any()


@pytest.mark.parametrize(("name", "dtype"), NAME_DTYPES, ids=str)
@each("shape", SHAPES)
def test_a_row_has_its_bits_in_any_company(shape: Shape, name: str, dtype: torch.dtype) -> None:
    kernels, ids = kernels_of(name, dtype), torch.tensor(IDS)
    adapters, (base, x) = adapters_of(kernels, shape, dtype), inputs_of(shape, dtype)
    whole = kernels.add_lora(base.clone(), x, adapters, ids)
    for start, stop in [(0, 1), (2, 4), (6, 27), (26, 29), (27, 28), (3, 3), (29, 97)]:
        rows = slice(start, stop)
        assert torch.equal(kernels.add_lora(base[rows].clone(), x[rows], adapters, ids[rows]), whole[rows])
    order = torch.arange(len(IDS)).flip(0)
    assert torch.equal(kernels.add_lora(base[order], x[order], adapters, ids[order]), whole[order])
    if isinstance(kernels, NativeKernels):
        others = [kernels_of(name, dtype, num_threads) for num_threads in pick([3], [1, 3])]
        assert all(torch.equal(other.add_lora(base.clone(), x, adapters, ids), whole) for other in others)


@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES, ids=str)
def test_a_recorded_step_reads_slots_ids_and_rows_when_replayed(level: str, dtype: torch.dtype) -> None:
    kernels = native(level, 2, dtype)
    adapters, (base, x) = adapters_of(kernels, QKV, dtype), inputs_of(QKV, dtype)
    places = torch.full((len(IDS),), -1)
    with kernels.recording() as tape:
        out = kernels.add_lora(base.clone(), x, adapters, places)
    before = out.clone()
    places[:9] = torch.tensor(IDS[:9])
    expected = kernels.add_lora(base.clone(), x, adapters, torch.tensor(IDS))
    tape.replay(9, [])
    assert torch.equal(out[:9], expected[:9])
    assert torch.equal(out[9:], before[9:])
