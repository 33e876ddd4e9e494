"""The largest logit and its place, without the others: what `max` says of all of them, to the bit, on every level."""

from itertools import product

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import InOneForm, native
from tests.kernels.levels import LEVEL_DTYPES, LEVELS

from octavo.kernels.native import NativeKernels
from octavo.kernels.quantization import IntegerFormat

VOCAB_SIZES = [1, 31, 64, 1000, 5003]  # less than a panel, odd, many groups of panels
# What weights are kept in.
INTEGERS = [IntegerFormat(bits=8, group_size=None), IntegerFormat(bits=4, group_size=32)]
INTEGERS.append(IntegerFormat(bits=4, group_size=None, is_two_level=True))
KEPT: list[tuple[str, torch.dtype | IntegerFormat]] = [*LEVEL_DTYPES, *product(LEVELS, INTEGERS)]

pytestmark = pytest.mark.parametrize(("level", "kept"), KEPT, ids=str)


def dtype_of(kept: torch.dtype | IntegerFormat) -> torch.dtype:
    """Return the dtype of activations."""
    return kept if isinstance(kept, torch.dtype) else torch.bfloat16


def make_kernels(level: str, num_threads: int, kept: torch.dtype | IntegerFormat) -> NativeKernels:
    return native(level, num_threads, kept) if isinstance(kept, torch.dtype) else InOneForm(level, kept, num_threads)


def assert_like_max(kernels: NativeKernels, x: torch.Tensor, weight: torch.Tensor) -> None:
    packed = kernels.pack_linear(weight, None, "logits")
    values, ids = kernels.logits_argmax(x, packed)
    expected_values, expected_ids = kernels.logits_linear(x, packed).max(-1)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    is_finite = expected_values.isfinite()
    assert torch.equal(ids[is_finite], expected_ids[is_finite])
    assert bool(((ids >= 0) & (ids < len(weight))).all())


def random(kept: torch.dtype | IntegerFormat, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype_of(kept))


@each("vocab_size", VOCAB_SIZES)
@each("num_rows", [1, 2, 17, 33, 130])
def test_it_is_the_largest_of_all(
    level: str, kept: torch.dtype | IntegerFormat, num_rows: int, vocab_size: int
) -> None:
    x, weight = random(kept, num_rows, num_rows, 70), random(kept, vocab_size, vocab_size, 70)
    assert_like_max(make_kernels(level, 3, kept), x, weight)


def test_of_the_first_outputs(level: str, kept: torch.dtype | IntegerFormat) -> None:
    """A view of the weight gives the bits of the logits that it still has."""
    x, weight, kernels = random(kept, 1, 5, 70), random(kept, 2, 500, 70), make_kernels(level, 3, kept)
    packed = kernels.pack_linear(weight, None, "logits")
    values, ids = kernels.logits_argmax(x, kernels.first_outputs(packed, 192))
    expected_values, expected_ids = kernels.logits_linear(x, packed)[:, :192].max(-1)
    assert torch.equal(values, expected_values)
    assert torch.equal(ids, expected_ids)


def test_of_equals_it_is_the_first(level: str, kept: torch.dtype | IntegerFormat) -> None:
    """Few weights, often repeated: ties in a vector, between vectors, panels and groups of them."""
    weight = random(kept, 3, 40, 32)[torch.randint(40, (3001,), generator=torch.Generator().manual_seed(4))]
    assert_like_max(make_kernels(level, 3, kept), random(kept, 5, 50, 32), weight)


def test_what_pads_a_panel_never_leads(level: str, kept: torch.dtype | IntegerFormat) -> None:
    """All logits are negative, and those that are not there would be zeros."""
    assert_like_max(make_kernels(level, 2, kept), random(kept, 6, 20, 32).abs(), -random(kept, 7, 70, 32).abs())


@each("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(level: str, kept: torch.dtype | IntegerFormat, value: float) -> None:
    kernels, x, weight = make_kernels(level, 2, kept), random(kept, 8, 33, 32), random(kept, 9, 2000, 32)
    x[5, 3] = value
    values, _ = kernels.logits_argmax(x, kernels.pack_linear(weight, None, "logits"))
    assert values.isfinite().logical_not().nonzero().flatten().tolist() == [5]
    assert_like_max(kernels, x, weight)


def test_a_late_nan_is_not_overtaken(level: str, kept: torch.dtype | IntegerFormat) -> None:
    if isinstance(kept, IntegerFormat):
        pytest.skip("no integer is a NaN")
    weight = random(kept, 10, 2000, 32)
    weight[7] = float("nan")
    kernels = make_kernels(level, 2, kept)
    values, _ = kernels.logits_argmax(random(kept, 11, 3, 32), kernels.pack_linear(weight, None, "logits"))
    assert bool(values.isnan().all())
