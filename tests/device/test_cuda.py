"""Without a GPU nothing of CUDA is touched, and what would compute on one says so."""

import subprocess
import sys

import pytest
import torch

from octavo.device.gpu import CudaKind
from octavo.device.manager import DeviceManager
from octavo.errors import DeviceUnavailableError

PROGRAM = """
import sys, torch
from octavo import LLM
LLM("demo", device="cpu", max_model_len=64).generate(["x"], use_tqdm=False)
print(torch.cuda.is_initialized(), *sorted(sys.modules))
"""


@pytest.mark.full  # by default tests/server/test_start.py looks at what is mapped in a core
def test_an_engine_on_a_cpu_imports_nothing_of_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    is_initialized, *modules = done.stdout.split()
    assert is_initialized == "False"
    assert "octavo.worker.worker" in modules
    assert not [name for name in modules if name.startswith(("octavo.device.gpu", "triton"))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_absent_is_an_error() -> None:
    assert not CudaKind().is_available()
    with pytest.raises(DeviceUnavailableError, match="has only: "):
        DeviceManager("cuda")


def test_a_cpu_has_no_queue() -> None:
    assert DeviceManager("cpu").queue() is None
