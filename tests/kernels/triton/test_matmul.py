"""Dense linears with one order of summation: right, and the same bits for a row in any batch and by any tile."""

import pytest
import torch
from tests.breadth import pick
from tests.kernels.triton.device import DEVICE

from octavo.kernels.reference import Kernels
from octavo.kernels.triton.dense import dense_linear
from octavo.kernels.triton.one_row import one_row_linear
from octavo.kernels.types import SILU, Activation, Fused

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (130, 100), (64, 257), (200, 640)]  # N, K


def tensors(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows)
    sizes = ((num_rows, shape[1]), shape, shape[:1])
    return tuple(torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)


@pytest.mark.parametrize("dtype", pick(DTYPES[:2], DTYPES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", pick([65], [1, 65]))
def test_products_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, int], num_rows: int) -> None:
    x, weight, bias = tensors(num_rows, shape, dtype)
    for given in (bias, None):
        exact = x.double() @ weight.double().T + (0.0 if given is None else given.double())
        # Float32 sums of K products of size 1, and one rounding to the dtype.
        bound = 4 * shape[1] ** 0.5 * 2.0**-23 * shape[1] ** 0.5 + torch.finfo(dtype).eps * exact.abs()
        assert ((dense_linear(x, weight, given).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", pick([torch.bfloat16], DTYPES), ids=str)
def test_a_row_has_its_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Each number of rows is another tile: 1, 8, 16, 32, 64, 128."""
    x, weight, bias = tensors(300, (200, 640), dtype)
    whole = dense_linear(x, weight, bias)
    for start, stop in [(0, 1), (64, 65), (128, 130), (3, 16), (8, 32), (0, 107)]:
        assert torch.equal(dense_linear(x[start:stop], weight, bias), whole[start:stop])


def test_another_order_of_summation_shows() -> None:
    """Else equal bits would say nothing."""
    x, weight, _ = tensors(3, (200, 640), torch.float32)
    turned = dense_linear(x.flip(1), weight.flip(1), None)
    assert not torch.equal(turned, dense_linear(x, weight, None))


def test_no_rows_are_no_rows() -> None:
    _, weight, bias = tensors(1, (5, 7), torch.float32)
    assert dense_linear(weight[:0], weight, bias).shape == (0, 5)


@pytest.mark.parametrize("dtype", pick([torch.bfloat16], DTYPES), ids=str)
@pytest.mark.parametrize("in_size", [100, 1024, 2100])
def test_one_row_with_what_stands_before_it(in_size: int, dtype: torch.dtype) -> None:
    """What is rounded in between differs by less than the dtype's step from what the reference rounds."""
    generator, kernels = torch.Generator().manual_seed(in_size), Kernels()
    row, residual, norm_weight = (torch.randn(1, in_size, generator=generator).to(DEVICE, dtype) for _ in range(3))
    weight, bias = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in ((70, in_size), (70,)))
    packed = kernels.pack_linear(weight * in_size**-0.5, bias)

    def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=16 * torch.finfo(dtype).eps)

    for fused in (
        Fused(residual=residual, norm_weight=norm_weight[0], eps=1e-6, norm_offset=1.0),
        Fused(residual=None, norm_weight=norm_weight[0], eps=1e-6),
    ):
        found, total = one_row_linear(row, packed, fused=fused)
        expected, expected_total = kernels.normed_linear(row, fused, packed)
        assert torch.equal(total, expected_total)
        assert_near(found, expected)
    for activation in (SILU, Activation("relu2"), Activation("clamped_swiglu", limit=0.5)):
        before = torch.cat([row, residual], dim=1) if activation.is_gated else row
        found, _ = one_row_linear(before, packed, activation=activation)
        expected = kernels.linear(kernels.activate(before, activation), packed)
        assert_near(found, expected)
    assert_near(one_row_linear(row, packed)[0], kernels.linear(row, packed))
