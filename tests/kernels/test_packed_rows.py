"""Rows read of a packed weight: the bits that were packed, in odd sizes, alone and among many."""

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import native
from tests.kernels.levels import LEVELS

from octavo.kernels.reference import Kernels


@pytest.mark.parametrize("level", LEVELS)
@each("in_size", [1, 2, 31, 32, 33, 70, 1024])
@each("num_outputs", [1, 15, 16, 31, 33, 100, 1001])
@each(("dtype", "bits"), [(torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)])
def test_they_are_what_was_packed(
    level: str, num_outputs: int, in_size: int, dtype: torch.dtype, bits: torch.dtype
) -> None:
    """All 65,536 upper patterns of bits in turn, NaN among them: compared as integers."""
    kernels = native(level, 2, dtype)
    weight = (torch.arange(num_outputs * in_size) * 40_503 << 8 * (bits.itemsize - 2)).to(bits)
    weight = weight.view(num_outputs, in_size)
    packed = kernels.pack_linear(weight.view(dtype), None, "logits")
    ids = torch.randint(num_outputs, (90,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(kernels.packed_rows(ids, packed, in_size).view(bits), weight[ids])
    one = kernels.packed_rows(ids[40:41].to(torch.int32), packed, in_size)
    assert torch.equal(one.view(bits), weight[ids[40:41]])


def test_the_reference_reads_its_own_layout() -> None:
    weight = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
    packed = Kernels().pack_linear(weight, None, "logits")
    assert torch.equal(Kernels().packed_rows(torch.tensor([8, 0]), packed, 5), weight[[8, 0]])


@pytest.mark.parametrize("level", LEVELS)
@each("token_id", [-1, 40])
def test_an_id_that_is_none_is_an_error(level: str, token_id: int) -> None:
    packed = native(level, 1).pack_linear(torch.zeros(40, 8, dtype=torch.bfloat16), None, "logits")
    with pytest.raises(IndexError, match="id is out of range"):
        native(level, 1).packed_rows(torch.tensor([3, token_id]), packed, 8)
