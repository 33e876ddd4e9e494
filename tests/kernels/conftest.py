"""The kernels under test, and one thread for the many small ops of torch."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from tests.kernels.levels import LEVEL_DTYPES

from octavo.kernels.native import NativeKernels
from octavo.kernels.native_weights import IntegerWeights, LinearSpec, address
from octavo.kernels.onednn import Float32CpuKernels, HalfCpuKernels, has_onednn
from octavo.kernels.quantization import IntegerFormat, LowBitWeight, QuantizedWeight, WeightFormat
from octavo.kernels.reference import Kernels
from octavo.kernels.types import LinearRole, PackedLinear

# Every kernel set that is tried on this machine, with a dtype that it is for.
FAST = [
    ("float32", torch.float32),
    ("half", torch.bfloat16),
    ("half", torch.float16),
    *((f"native-{level}", dtype) for level, dtype in LEVEL_DTYPES),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=FAST, ids=lambda param: f"{param[0]}-{param[1]}".replace("torch.", ""))
def fast_and_dtype(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    """One set of fast kernels, and a dtype."""
    name, dtype = request.param
    if name.startswith("native-"):
        return native(name.removeprefix("native-"), 2, dtype), dtype
    if not has_onednn(dtype):
        pytest.skip(f"oneDNN does not compute {dtype} on this processor")
    return Float32CpuKernels() if name == "float32" else HalfCpuKernels(), dtype


@cache
def native(level: str, num_threads: int, dtype: torch.dtype = torch.bfloat16) -> NativeKernels:
    """Return the C++ kernels of a level; the same object each time, for it holds threads."""
    return NativeKernels(level, num_threads, dtype)


class InOneForm(NativeKernels):
    """The same kernels; every weight that they pack is brought into one form."""

    def __init__(
        self, level: str, form: IntegerFormat, num_threads: int = 2, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        vars(self).update(vars(native(level, num_threads, dtype)))
        self._form = form

    def pack_linear(
        self,
        weight: torch.Tensor | LowBitWeight,
        bias: torch.Tensor | None,
        role: LinearRole = "plain",
        form: WeightFormat | None = None,
    ) -> PackedLinear:
        return super().pack_linear(weight, bias, role, form if role == "router" else form or self._form)

    def quantize(self, weight: torch.Tensor, form: IntegerFormat) -> QuantizedWeight:
        """Quantize to the integers that packing would choose, in the plain layout."""
        weight, (num_outputs, in_size) = weight.contiguous(), weight.shape
        values = torch.empty(num_outputs, in_size, dtype=torch.int8)
        scales = torch.empty(num_outputs, form.num_groups(in_size), dtype=torch.float32)
        num_multipliers = form.num_multipliers(in_size)
        multipliers = torch.empty(num_outputs, num_multipliers, dtype=torch.int8) if num_multipliers else None
        kind = self.weight_kinds[IntegerFormat]
        assert isinstance(kind, IntegerWeights)
        integers = kind.describe(LinearSpec(num_outputs, in_size, "plain", form))
        self.native.quantize(integers, *map(address, (weight, values, scales, multipliers)))
        return QuantizedWeight(format=form, values=values, scales=scales, multipliers=multipliers)
