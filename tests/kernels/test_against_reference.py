"""The fast kernels compute what the reference says, to a few roundings of the dtype, in odd sizes."""

from dataclasses import replace

import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.conftest import native
from tests.kernels.levels import DTYPES, LEVEL_DTYPES
from tests.kernels.ops import CASES, MAX_ROWS, Case

from octavo.kernels.dispatch import select_kernels
from octavo.kernels.reference import Kernels
from octavo.kernels.types import SILU, Activation, Fused, GeluKind, PackedLinear, Routes, Routing


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow 4 roundings of the dtype on values of size 1 to 10, and float32 the noise of summing in another order."""
    tolerance = 4 * torch.finfo(expected.dtype).eps + 4e-6
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@each("case", CASES)
@each("num_rows", pick([0, 1, 129], [0, 1, 2, 7, 33, 129]))
def test_fast_is_reference(case: Case, num_rows: int, fast_and_dtype: tuple[Kernels, torch.dtype]) -> None:
    fast, dtype = fast_and_dtype
    op, rows = case.make(dtype), slice(3, 3 + num_rows)
    with torch.inference_mode():
        assert_close(op(fast, rows), op(Kernels(), rows))


@each("num_rows", pick([2], [2, 40]))
@pytest.mark.parametrize(("level", "dtype"), LEVEL_DTYPES)
def test_many_outputs_of_many_inputs(level: str, dtype: torch.dtype, num_rows: int) -> None:
    """A block of k is multiplied by many panels, and a thread has several times as many: their results share memory."""
    x, weight = torch.randn(num_rows, 2112), torch.randn(7744, 66).repeat(1, 32) / 8
    x, weight = x.to(dtype), weight.to(dtype)
    kernels = native(level, 1, dtype)
    found = kernels.linear(x, kernels.pack_linear(weight, None))
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T, atol=0.1, rtol=0.02)


class WrongKernels(Kernels):
    """Each op wrong in a small way."""

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return super().linear(x[:, 1:], super().pack_linear(packed.weight[:, 1:], packed.bias))

    def select_columns(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().select_columns(x, order.roll(1))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        return super().rms_norm(x, weight, eps + 0.5, offset)

    def layer_norm(self, x: torch.Tensor, fused: Fused) -> torch.Tensor:
        return super().layer_norm(x, replace(fused, eps=fused.eps + 0.5))

    def part_squares(self, x: torch.Tensor, sizes: tuple[int, int], num_counted: int) -> torch.Tensor:
        return super().part_squares(x, sizes, num_counted) * 1.2

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return super().activate(torch.cat((second, first), dim=-1), activation)

    def scaled_sum(self, x: torch.Tensor, residual: torch.Tensor | None, scale: float) -> torch.Tensor:
        return super().scaled_sum(x, residual, scale * 1.05)

    def gelu(self, x: torch.Tensor, kind: GeluKind) -> torch.Tensor:
        return super().gelu(-x, kind)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotary(x, cos, -sin)

    def route(self, x: torch.Tensor, router: PackedLinear, routing: Routing) -> Routes:
        routes = super().route(x, router, routing)
        return replace(routes, weights=routes.weights.flip(-1) * 0.99)

    def combine_experts(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().combine_experts(rows.roll(1, 0), weights)


@pytest.mark.parametrize("dtype", pick([torch.bfloat16], DTYPES), ids=str)
@each("case", CASES)
def test_a_wrong_kernel_is_noticed(case: Case, dtype: torch.dtype) -> None:
    op, rows = case.make(dtype), slice(0, MAX_ROWS)
    with torch.inference_mode(), pytest.raises(AssertionError):
        assert_close(op(WrongKernels(), rows), op(Kernels(), rows))


@each("case", CASES)
def test_arguments_stay_as_they_are(case: Case, fast_and_dtype: tuple[Kernels, torch.dtype]) -> None:
    """Twice the same call, twice the same answer: nothing was written into what was read."""
    fast, dtype = fast_and_dtype
    op, rows = case.make(dtype), slice(0, 9)
    with torch.inference_mode():
        assert torch.equal(op(fast, rows), op(fast, rows))


def test_silu_far_out() -> None:
    """Where exp overflows, the answer is still gate or zero."""
    gate = torch.tensor([[-1e4, -200.0, -89.0, 0.0, 89.0, 1e4]])
    kernels = select_kernels(torch.device("cpu"), torch.float32)
    result = kernels.activate(torch.cat((gate, torch.ones_like(gate)), dim=-1), SILU)
    torch.testing.assert_close(result, torch.tensor([[0.0, 0.0, 0.0, 0.0, 89.0, 1e4]]), atol=1e-30, rtol=0)


def test_reference_is_for_devices_without_kernels_of_their_own() -> None:
    assert select_kernels(torch.device("xpu"), torch.bfloat16).name == "torch-reference"
    assert select_kernels(torch.device("cpu"), torch.float64).name == "torch-reference"
