"""Float32 maps beside float64: how little they err, and that what is not finite stays in its row, on every level."""

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import native
from tests.kernels.levels import LEVELS

from octavo.kernels.types import SILU, Fused

pytestmark = pytest.mark.parametrize("level", LEVELS)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each(("num_rows", "num_outputs", "in_size"), [(1, 70, 5000), (40, 33, 129), (140, 260, 1030)])
def test_they_err_as_sums_of_short_sums_do(level: str, num_rows: int, num_outputs: int, in_size: int) -> None:
    """Random numbers of size 1: partial sums of i are of size sqrt(i), rounded by 2^-24 / sqrt(3) of it each time.

    Blocks of 128 inputs, and the sum of the blocks. One sum of all errs five times as much for 5,000 inputs.
    """
    x, weight = random(1, num_rows, in_size), random(2, num_outputs, in_size)
    bias = random(3, num_outputs)
    kernels = native(level, 2, torch.float32)
    result = kernels.linear(x, kernels.pack_linear(weight, bias)).double()
    exact = x.double() @ weight.double().T + bias.double()
    of_blocks, of_their_sum = in_size * 128 / 2, in_size**2 / 128 / 2  # variances of what is rounded, added up
    expected = 2**-24 / 3**0.5 * (of_blocks + of_their_sum) ** 0.5
    assert (result - exact).square().mean().sqrt() < 1.3 * expected


@each("num_rows", [2, 9, 21, 150])
@each("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(level: str, num_rows: int, value: float) -> None:
    kernels, x, residual = native(level, 2, torch.float32), random(4, num_rows, 70), random(5, num_rows, 70)
    gate_up = kernels.pack_linear(random(6, 2 * 50, 70), None, "gated")
    down, plain = kernels.pack_linear(random(7, 70, 50), None), kernels.pack_linear(random(8, 99, 70), None)
    norm, bad = torch.ones(70), num_rows // 2

    def compute() -> torch.Tensor:
        of_mlp = kernels.mlp(x, Fused(residual=residual, norm_weight=norm, eps=1e-6), gate_up, down)
        return torch.cat((kernels.linear(x, plain), kernels.activated_linear(x, gate_up, SILU), *of_mlp), dim=-1)

    expected = compute()
    x[bad, 3] = value
    result = compute()
    others = torch.arange(num_rows) != bad
    assert torch.equal(result[others], expected[others])
    assert not result[bad, :99].isfinite().any()
