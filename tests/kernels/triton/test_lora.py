"""Adapters of each row's own: the reference's sums, the same bits in any batch, and nothing for rows without one.

Legend: T = rows, A = adapters, K = inputs, R = rank, N = outputs.
"""

import pytest
import torch
from tests.kernels.triton.device import DEVICE

from octavo.kernels.reference import Kernels
from octavo.kernels.triton.lora import add_lora
from octavo.kernels.types import LoraAdapters

IDS = [2, -1, 0, 2, 2, -1, 0] + [2] * 20  # adapter 1 of 3 has no rows, 2 has more than a block


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def arguments(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, LoraAdapters, torch.Tensor]:
    num_rows, in_size, num_outputs = len(IDS), 600, 150
    down = random(3, rank, in_size, dtype=dtype) * in_size**-0.5
    adapters = LoraAdapters(down=down, up=random(3, num_outputs, rank, dtype=dtype) * rank**-0.5)
    base, x = random(num_rows, num_outputs, dtype=dtype), random(num_rows, in_size, dtype=dtype)
    return base, x, adapters, torch.tensor(IDS, device=DEVICE)


@pytest.mark.parametrize(("rank", "dtype"), [(8, torch.bfloat16), (16, torch.float16), (50, torch.float32)], ids=str)
def test_each_row_meets_its_adapter(rank: int, dtype: torch.dtype) -> None:
    base, x, adapters, ids = arguments(rank, dtype)
    found, expected = add_lora(base, x, adapters, ids), Kernels().add_lora(base, x, adapters, ids)
    # What lies between and the result are rounded once each; sums of either order differ by less.
    bound = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=bound, atol=8 * bound)
    assert torch.equal(found[ids < 0], base[ids < 0])
    assert not torch.isclose(found[ids >= 0], base[ids >= 0]).all(dim=-1).any()
    turned = Kernels().add_lora(base, x, adapters, (ids + 1) % 3)
    assert not torch.isclose(found, turned, rtol=bound, atol=8 * bound).all(dim=-1).any()


def test_a_row_has_its_bits_in_any_batch() -> None:
    base, x, adapters, ids = arguments(16, torch.bfloat16)
    whole = add_lora(base, x, adapters, ids)
    for start, stop in [(0, 1), (2, 4), (6, 27), (26, 27)]:
        rows = slice(start, stop)
        assert torch.equal(add_lora(base[rows], x[rows], adapters, ids[rows]), whole[rows])


def test_no_rows_and_no_adapters() -> None:
    base, x, adapters, ids = arguments(8, torch.float32)
    assert add_lora(base[:0], x[:0], adapters, ids[:0]).shape == (0, 150)
    assert torch.equal(add_lora(base, x, adapters, torch.full_like(ids, -1)), base)
