"""The kernels under test, and one thread for the many small ops of torch."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from octavo.kernels import onednn
from octavo.kernels.cpu_float32 import Float32CpuKernels
from octavo.kernels.cpu_half import HalfCpuKernels
from octavo.kernels.dispatch import Kernels, PackedLinear
from octavo.kernels.native import NativeKernels
from octavo.kernels.native_integers import IntegerNativeKernels
from octavo.kernels.native_level import available_levels, is_built
from octavo.kernels.quantization import IntegerFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEVELS = available_levels() if is_built() else []
NATIVE_DTYPES = [torch.float32, torch.bfloat16]
# Every kernel set that this machine can run, with a dtype that it is for.
FAST = [
    ("float32", torch.float32),
    ("half", torch.bfloat16),
    ("half", torch.float16),
    *((f"native-{level}", dtype) for level in LEVELS for dtype in NATIVE_DTYPES),
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
    if not onednn.is_supported(dtype):
        pytest.skip(f"oneDNN does not compute {dtype} on this processor")
    return Float32CpuKernels() if name == "float32" else HalfCpuKernels(), dtype


@cache
def native(level: str, num_threads: int, dtype: torch.dtype = torch.bfloat16) -> NativeKernels:
    """Return the C++ kernels of a level; the same object each time, for it holds threads."""
    kind = IntegerNativeKernels if dtype == torch.bfloat16 else NativeKernels
    return kind(level, num_threads, dtype)


class InOneForm(IntegerNativeKernels):
    """The same kernels; every weight that they pack is brought into one form."""

    def __init__(self, level: str, form: IntegerFormat, num_threads: int = 2) -> None:
        vars(self).update(vars(native(level, num_threads)))
        self._form = form

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self.pack_quantized(weight, bias, self._form, "plain")

    def pack_logits_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self.pack_quantized(weight, bias, self._form, "logits")

    def pack_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self.pack_quantized(weight, bias, self._form, "gated")
