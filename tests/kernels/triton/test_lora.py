"""Adapters of each row's own: what the formula says, the same bits in any batch, and nothing for rows without one.

Legend: T = rows, S = slots, K = inputs, R = the largest rank, N = outputs.
"""

from dataclasses import replace

import pytest
import torch
from tests.kernels.lora import Shape, adapters_of, formula, random
from tests.kernels.triton.device import DEVICE

from octavo.kernels.reference import Kernels, LoraAdapters
from octavo.kernels.triton.lora import add_lora

IDS = [2, -1, 0, 2, 2, -1, 0] + [2] * 20 + [3]  # slot 1 of 4 has no rows, 2 has more than a block, 3 leaves them alone
SHAPE = Shape(in_size=600, parts=(150, 33), max_rank=50, ranks=(7, 50, 40, 0))


def arguments(max_rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, LoraAdapters, torch.Tensor]:
    shape = replace(SHAPE, max_rank=max_rank, ranks=tuple(min(rank, max_rank) for rank in SHAPE.ranks))
    base = random(len(IDS), shape.num_outputs, dtype=dtype, device=DEVICE)
    x = random(len(IDS), shape.in_size, dtype=dtype, device=DEVICE)
    return base, x, adapters_of(Kernels(), shape, dtype, DEVICE), torch.tensor(IDS, device=DEVICE)


@pytest.mark.parametrize(("rank", "dtype"), [(8, torch.bfloat16), (16, torch.float16), (50, torch.float32)], ids=str)
def test_each_row_meets_its_adapter(rank: int, dtype: torch.dtype) -> None:
    base, x, adapters, ids = arguments(rank, dtype)
    found, expected = add_lora(base.clone(), x, adapters, ids), formula(base, x, adapters, IDS)
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=1e-5)
    untouched = (ids < 0) | (ids == 3)
    assert torch.equal(found[untouched], base[untouched])
    assert not torch.isclose(found[~untouched], base[~untouched]).all(dim=-1).any()


def test_a_row_has_its_bits_in_any_batch() -> None:
    base, x, adapters, ids = arguments(16, torch.bfloat16)
    whole = add_lora(base.clone(), x, adapters, ids)
    for start, stop in [(0, 1), (2, 4), (6, 27), (26, 27)]:
        rows = slice(start, stop)
        assert torch.equal(add_lora(base[rows].clone(), x[rows], adapters, ids[rows]), whole[rows])


def test_no_rows_and_no_adapters() -> None:
    base, x, adapters, ids = arguments(8, torch.float32)
    assert add_lora(base[:0], x[:0], adapters, ids[:0]).shape == (0, 183)
    assert torch.equal(add_lora(base.clone(), x, adapters, torch.full_like(ids, -1)), base)
