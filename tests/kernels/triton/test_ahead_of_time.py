"""All kernels compile for GPUs that are not here, down to machine code, and their numbers fit into registers."""

import os
import subprocess
import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")


@pytest.fixture
def compile_in_process(pytestconfig: pytest.Config) -> Callable[..., CompletedProcess[str]]:
    """Run Python with these arguments; compiled code is kept for the next run, by what it was made from."""
    assert pytestconfig.cache is not None
    environment = {**os.environ, "TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton"))}
    environment.pop("TRITON_INTERPRET", None)

    def run(*arguments: str) -> CompletedProcess[str]:
        command, folder = [sys.executable, *arguments], pytestconfig.rootpath
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=folder)

    return run


@pytest.mark.full
@pytest.mark.timeout(600)  # 80 s for each on an idle machine
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, compile_in_process: Callable[..., CompletedProcess[str]]) -> None:
    done = compile_in_process("-m", "tests.kernels.triton.ahead_of_time", str(capability))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "_rms_norm_kernel" in done.stdout


@pytest.mark.full  # five seconds for a process with the compiler
def test_what_does_not_compile_is_noticed(compile_in_process: Callable[..., CompletedProcess[str]]) -> None:
    """Without it a compiler that is never called would pass. The older GPU has no such floats."""
    program = (
        "from tests.kernels.triton.ahead_of_time import Compiler; Compiler(80).install()\n"
        "import torch; from octavo.kernels.triton.row_ops import activate\n"
        "from octavo.kernels.types import SILU\n"
        "activate(torch.zeros(2, 64).to(torch.float8_e4m3fn), SILU)"
    )
    assert "fp8e4nv not supported" in compile_in_process("-c", program).stderr
