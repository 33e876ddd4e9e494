"""Programmatic dependent launch, on Hopper and later: a kernel is launched while the one before it still runs.

Its programs begin, and wait before they read or write anything: what a launch costs is hidden. Each kernel that is
launched so calls `await_previous` before all else, which also keeps the order of kernels that do not follow directly.
"""

from functools import cache

import torch
import triton
from triton import knobs
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)


@triton.jit
def await_previous(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel be launched, and wait until the previous ones have written everything."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@cache
def compute_capability() -> tuple[int, int]:
    """Return that of this process's NVIDIA GPU; (0, 0) without one."""
    if knobs.runtime.interpret or torch.version.hip or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability()


@cache
def overlap() -> dict[str, bool]:
    """Return the options of a launch: the kernel's argument OVERLAPS, and Triton's, if this device can."""
    if compute_capability() < _FIRST_CAPABILITY:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
