"""Every launcher of the layers' kernels, called once for each variant that a model may ask for."""

import torch

from octavo.kernels.triton.rms_norm import add_rms_norm, rms_norm
from octavo.kernels.triton.silu_and_mul import silu_and_mul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launch_all(capability: int) -> None:
    for dtype in DTYPES:
        _launch_small(dtype)


def _launch_small(dtype: torch.dtype) -> None:
    for size in (100, 1024, 4096):
        x, weight = torch.zeros(2, size, dtype=dtype), torch.zeros(size, dtype=dtype)
        rms_norm(x, weight, 1e-6)
        add_rms_norm(x, x, weight, 1e-6)
        silu_and_mul(x)
