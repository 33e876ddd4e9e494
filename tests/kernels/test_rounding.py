"""What needs one rounding is rounded to the nearest, ties to even: in vectors, and in the tail that fills none."""

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import native
from tests.kernels.levels import LEVELS

from octavo.kernels.native import NativeKernels
from octavo.kernels.types import Fused

SIZES = [1, 15, 16, 17, 31, 33, 48, 64, 77, 100]

pytestmark = pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native(request.param, 2)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@each("size", SIZES)
def test_sums_of_two(kernels: NativeKernels, size: int) -> None:
    """The residual's stream: what torch gives, to the bit."""
    x, residual = random(1, 200, size), random(2, 200, size)
    fused = Fused(residual=residual, norm_weight=torch.ones(size, dtype=torch.bfloat16), eps=1e-6)
    _, total = kernels.add_rms_norm(x, fused)
    assert torch.equal(total, x + residual)


@each("size", SIZES)
def test_products_of_two(kernels: NativeKernels, size: int) -> None:
    """A diagonal weight: each output is one product, exact in float32; of 25,600 some lie in the middle of two."""
    x, factors = random(3, 256, size), random(4, size)
    packed = kernels.pack_linear(torch.diag(factors), None)
    exact = x.float() * factors.float()
    assert torch.equal(kernels.linear(x, packed), exact.to(torch.bfloat16))
    has_tie = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    assert size < 64 or has_tie.any()
    assert torch.equal(kernels.logits_linear(x, packed), exact)
