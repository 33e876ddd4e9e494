"""Where Triton's kernels run in tests: on a GPU, or on a CPU under Triton's interpreter (see `tests/conftest.py`).

Skips the tests of whoever imports this where there is no Triton, as on macOS.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from triton import knobs

from octavo.kernels.triton import interpreter

if knobs.runtime.interpret:
    interpreter.repair()

DEVICE = torch.device("cpu" if knobs.runtime.interpret else "cuda")
