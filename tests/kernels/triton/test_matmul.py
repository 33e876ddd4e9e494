"""Maps with one order of summation: right, and the same bits for a row in any batch, with splits apart or not."""

import pytest
import torch
from tests.breadth import pick
from tests.kernels.triton.device import DEVICE

from octavo.kernels.triton import matmul as module
from octavo.kernels.triton.matmul import matmul, split_size

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
        assert ((matmul(x, weight, given).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", pick([torch.bfloat16], DTYPES), ids=str)
def test_a_row_has_its_bits_in_any_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = tensors(130, (200, 640), dtype)
    whole = matmul(x, weight, bias)
    # numpy, which multiplies for the interpreter, has other bits at other places of a tile of 64 rows. A GPU has not.
    elsewhere = [(63, 65), (129, 130), (7, 107)] if DEVICE.type == "cuda" else []
    for start, stop in [(0, 1), (64, 65), (128, 130), (0, 107), *elsewhere]:
        assert torch.equal(matmul(x[start:stop], weight, bias), whole[start:stop])
    split = split_size(200, 640, 128, 128)
    assert split < 640
    monkeypatch.setattr(module, "_DENSE_PROGRAMS", 0)  # never apart; splits stay as they were
    monkeypatch.setattr(module, "split_size", lambda *_: split)
    assert torch.equal(matmul(x, weight, bias), whole)


def test_another_order_of_summation_shows() -> None:
    """Else equal bits would say nothing."""
    x, weight, _ = tensors(3, (200, 640), torch.float32)
    turned = matmul(x.flip(1), weight.flip(1), None)
    assert not torch.equal(turned, matmul(x, weight, None))


def test_no_rows_are_no_rows() -> None:
    _, weight, bias = tensors(1, (5, 7), torch.float32)
    assert matmul(weight[:0], weight, bias).shape == (0, 5)


@pytest.mark.parametrize("shape", [(1024, 2048), (6144, 1024), (151936, 1024), (4096, 12288), (1, 1)])
def test_splits_fill_a_gpu_with_one_tile_of_rows(shape: tuple[int, int]) -> None:
    split, tiles = split_size(*shape, 128, 128), -(-shape[0] // 128)
    assert split % 128 == 0
    num_programs = tiles * -(-shape[1] // split)
    assert num_programs <= max(tiles, 128)
    assert num_programs >= 64 or split == 128
