"""The kernels under test, and one thread for the many small ops."""

from collections.abc import Iterator

import pytest
import torch

from octavo.kernels import onednn
from octavo.kernels.dispatch import Kernels, select_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def fast(dtype: torch.dtype) -> Kernels:
    """The kernels that a CPU gets for this dtype."""
    if not onednn.is_supported(dtype):
        pytest.skip(f"oneDNN does not compute {dtype} on this processor: the reference is all there is")
    kernels = select_kernels(torch.device("cpu"), dtype)
    assert kernels.name.startswith("onednn")
    return kernels
