"""Where the time of native calls goes: `kernels/cpu/phases.h`, which `benchmarks.host.compute_share` reads."""

import pytest
import torch
from tests.kernels.conftest import InOneForm
from tests.kernels.levels import LEVELS

from octavo.kernels.native import NativeKernels
from octavo.kernels.quantization import IntegerFormat

pytestmark = pytest.mark.parametrize("level", LEVELS)


def phases_of_linear(kernels: NativeKernels) -> set[str]:
    """Return the phases of a call in which time has passed."""
    packed = kernels.pack_linear(torch.randn(256, 192).bfloat16(), None, "plain")
    before = kernels.native.phase_seconds()
    kernels.linear(torch.randn(3, 192).bfloat16(), packed)
    after = kernels.native.phase_seconds()
    return {phase for phase, seconds in after.items() if seconds > before[phase]}


@pytest.mark.parametrize("form", [None, IntegerFormat(bits=8, group_size=None)], ids=["dense", "int8"])
def test_a_linear_has_rows_and_products(level: str, form: IntegerFormat | None) -> None:
    kernels = NativeKernels(level, 1) if form is None else InOneForm(level, form, 1)
    assert phases_of_linear(kernels) == set()  # not started
    kernels.native.start_phases()
    assert phases_of_linear(kernels) == {"outside", "other", "rows", "products"}
    kernels.native.start_phases()
    assert max(kernels.native.phase_seconds().values()) == 0.0
