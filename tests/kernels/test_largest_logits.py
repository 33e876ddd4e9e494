"""The largest logit and its place, without the others: what `max` says of all of them, to the bit, on every level."""

import pytest
import torch
from tests.kernels.conftest import LEVELS, NATIVE_DTYPES, native

from octavo.kernels.native import NativeKernels

VOCAB_SIZES = [1, 31, 64, 1000, 5003]  # less than a panel, odd, many groups of panels


pytestmark = [
    pytest.mark.parametrize("level", LEVELS),
    pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str),
]


def assert_like_max(kernels: NativeKernels, x: torch.Tensor, weight: torch.Tensor) -> None:
    packed = kernels.pack_logits_linear(weight, None)
    values, ids = kernels.largest_logits(x, packed)
    expected_values, expected_ids = kernels.logits_linear(x, packed).max(-1)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    is_finite = expected_values.isfinite()
    assert torch.equal(ids[is_finite], expected_ids[is_finite])
    assert bool(((ids >= 0) & (ids < len(weight))).all())


def random(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("num_rows", [1, 2, 17, 33, 130])
def test_it_is_the_largest_of_all(level: str, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    assert_like_max(
        native(level, 3, dtype), random(dtype, num_rows, num_rows, 70), random(dtype, vocab_size, vocab_size, 70)
    )


def test_of_equals_it_is_the_first(level: str, dtype: torch.dtype) -> None:
    """Few weights, often repeated: ties in a vector, between vectors, panels and groups of them."""
    weight = random(dtype, 3, 40, 32)[torch.randint(40, (3001,), generator=torch.Generator().manual_seed(4))]
    assert_like_max(native(level, 3, dtype), random(dtype, 5, 50, 32), weight)


def test_what_pads_a_panel_never_leads(level: str, dtype: torch.dtype) -> None:
    """All logits are negative, and those that are not there would be zeros."""
    assert_like_max(native(level, 2, dtype), random(dtype, 6, 20, 32).abs(), -random(dtype, 7, 70, 32).abs())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(level: str, dtype: torch.dtype, value: float) -> None:
    x, weight = random(dtype, 8, 33, 32), random(dtype, 9, 2000, 32)
    x[5, 3] = value
    packed = native(level, 2, dtype).pack_logits_linear(weight, None)
    values, _ = native(level, 2, dtype).largest_logits(x, packed)
    assert values.isfinite().logical_not().nonzero().flatten().tolist() == [5]
    assert_like_max(native(level, 2, dtype), x, weight)


def test_a_late_nan_is_not_overtaken(level: str, dtype: torch.dtype) -> None:
    weight = random(dtype, 10, 2000, 32)
    weight[7] = float("nan")
    values, _ = native(level, 2, dtype).largest_logits(
        random(dtype, 11, 3, 32), native(level, 2, dtype).pack_logits_linear(weight, None)
    )
    assert bool(values.isnan().all())
