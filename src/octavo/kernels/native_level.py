"""Selects the C++ kernels of a process: those of the processor's best ISA level, a lower one, or none."""

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

from octavo.errors import UnknownOptionError
from octavo.kernels.native import NativeKernels
from octavo.kernels.native_blocks import BlockNativeKernels

logger = logging.getLogger(__name__)

_LEVEL_VARIABLE = "OCTAVO_CPU_LEVEL"  # amx, avx512, avx512_vnni, avx2_vnni, avx2, portable; torch: torch's ops


def native_kernels(dtype: torch.dtype = torch.bfloat16) -> NativeKernels | None:
    """Return the kernels of this processor's best level, or of the one in OCTAVO_CPU_LEVEL, with torch's threads.

    The same object for the same level, threads and dtype: kernels own threads, and a program may build many engines.
    None, logged once, if they were not built, or if the variable is `torch`.

    Raises:
        UnknownOptionError: OCTAVO_CPU_LEVEL names a level that this processor does not support.
    """
    wanted = os.environ.get(_LEVEL_VARIABLE)
    if wanted == "torch":
        return None
    if not is_built():
        _say_that_they_were_not_built()
        return None
    levels = available_levels()
    if wanted is not None and wanted not in levels:
        raise UnknownOptionError(_LEVEL_VARIABLE, wanted, [*levels, "torch"])
    return _kernels_of(wanted or levels[0], torch.get_num_threads(), dtype)


@cache
def _kernels_of(level: str, num_threads: int, dtype: torch.dtype) -> NativeKernels:
    return (BlockNativeKernels if dtype == torch.bfloat16 else NativeKernels)(level, num_threads, dtype)


@cache  # once
def _say_that_they_were_not_built() -> None:
    logger.warning("the C++ kernels were not built (no compiler at install?): computing with torch's ops instead")


def is_built() -> bool:
    """Return whether the C++ kernels were built, which takes a compiler when Octavo is installed."""
    return find_spec("octavo.kernels.cpu._cpu") is not None


def available_levels() -> list[str]:
    """Return the ISA levels of this processor, best first."""
    from octavo.kernels.cpu import _cpu

    return _cpu.levels()
