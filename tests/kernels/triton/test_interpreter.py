"""Under the repaired interpreter, numbers are rounded as torch rounds them, and products are those of the numbers."""

import pytest
import torch
import triton
from tests.kernels.triton.device import DEVICE
from triton import language as tl

SIZE = 64
NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@triton.jit
def _round_kernel(x: tl.tensor, out: tl.tensor, back: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    rounded = tl.load(x + at).to(out.dtype.element_ty)
    tl.store(out + at, rounded)
    tl.store(back + at, rounded.to(tl.float32))


@triton.jit
def _dot_kernel(a: tl.tensor, b: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_is_to_the_nearest(dtype: torch.dtype) -> None:
    ties = 1 + torch.arange(SIZE // 2) * torch.finfo(dtype).eps / 2  # every second one halfway between two
    small = torch.finfo(dtype).smallest_normal * torch.linspace(-2, 2, SIZE // 2)
    x = torch.cat((ties, small)).to(DEVICE)
    out, back = torch.empty(SIZE, dtype=dtype, device=DEVICE), torch.empty(SIZE, device=DEVICE)
    _round_kernel[(1,)](x, out, back, SIZE=SIZE)
    assert torch.equal(back, x.to(dtype).float())
    assert torch.equal(out.float(), back)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_products_are_exact(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-8, 9, (SIZE, SIZE), generator=torch.Generator().manual_seed(at)) for at in range(2))
    out = torch.empty(SIZE, SIZE, device=DEVICE)
    _dot_kernel[(1,)](a.to(DEVICE, dtype), b.to(DEVICE, dtype), out, SIZE=SIZE)
    assert torch.equal(out.cpu(), (a @ b).float())


def test_not_a_number_stays_one() -> None:
    x = torch.full((SIZE,), torch.nan, device=DEVICE)
    for dtype in NARROW:
        out, back = torch.empty(SIZE, dtype=dtype, device=DEVICE), torch.empty(SIZE, device=DEVICE)
        _round_kernel[(1,)](x, out, back, SIZE=SIZE)
        assert back.isnan().all()
