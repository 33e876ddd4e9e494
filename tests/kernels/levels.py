"""The ISA levels of the C++ kernels that a run tries."""

import torch
from tests.breadth import RUNS_ALL, pick

from octavo.kernels.dispatch import available_levels, is_built

ALL_LEVELS = available_levels() if is_built() else []
# The one that this machine computes with and the one for any machine; `make test-all` tries those between.
LEVELS = pick([*dict.fromkeys(ALL_LEVELS[:1] + ALL_LEVELS[-1:])], ALL_LEVELS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Each level in the dtype of most checkpoints, and the one that this machine computes with in float32, too. In float16,
# integer kernels and whole engines are tried by default.
LEVEL_DTYPES = [
    (level, dtype)
    for level in LEVELS
    for dtype in DTYPES
    if RUNS_ALL or dtype == torch.bfloat16 or (level, dtype) == (ALL_LEVELS[0], torch.float32)
]
