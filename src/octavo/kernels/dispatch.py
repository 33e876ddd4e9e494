"""Which kernels compute the ops of layers, by device and dtype: Triton's, those in C++, oneDNN's, or the reference.

Triton is imported only where it is selected: it costs half a second, and must know first how to run.
"""

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.kernels.native import NativeKernels
from octavo.kernels.onednn import Float32CpuKernels, HalfCpuKernels, has_onednn
from octavo.kernels.quantization import WeightFormat
from octavo.kernels.reference import Kernels

logger = logging.getLogger(__name__)

_LEVEL_VARIABLE = "OCTAVO_CPU_LEVEL"  # amx, avx512, avx512_vnni, avx2_vnni, avx2, portable; torch: torch's ops
_GPU_VARIABLE = "OCTAVO_GPU_KERNELS"  # triton, or torch: use torch's ops
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})  # of kernels in C++ and Triton

DENSE_ONLY: frozenset[WeightFormat | None] = frozenset({None})


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    forms: frozenset[WeightFormat | None] = DENSE_ONLY,
    *,
    deterministic: bool = False,
) -> Kernels:
    """Return the best kernels for this device and dtype, and for weights of these forms; None: dense ones.

    Whether they compute with a form is up to them: `Kernels.computes`. With `deterministic`, batch-invariant kernels
    are preferred to faster ones; see `Kernels.is_batch_invariant`.
    """
    if uses_triton(device, dtype):
        from octavo.kernels.triton.kernels import TritonKernels

        return TritonKernels(forms, deterministic=deterministic)
    if device.type == "cpu" and dtype in _DTYPES and (native := native_kernels(dtype)) is not None:
        return native
    if device.type == "cpu" and has_onednn(dtype):
        return Float32CpuKernels() if dtype == torch.float32 else HalfCpuKernels()
    return Kernels()


def has_kernels(device: torch.device, dtype: torch.dtype, *, is_quantized: bool = False) -> bool:
    """Return whether layers of this dtype are computed by more than the reference; oneDNN's know dense weights only."""
    if device.type != "cpu":
        return True
    kernels = select_kernels(device, dtype)
    return kernels.records_calls or (not is_quantized and type(kernels) is not Kernels)


def native_kernels(dtype: torch.dtype = torch.bfloat16) -> NativeKernels | None:
    """Return the kernels of this processor's best level, or of the one in OCTAVO_CPU_LEVEL, with torch's threads.

    The same object for the same level, threads and dtype: kernels own threads, and a program may build many engines.
    None, logged once, if they were not built, or if the variable is `torch`.
    """
    wanted = os.environ.get(_LEVEL_VARIABLE)
    if wanted == "torch":
        return None
    if not is_built():
        _say_once("the C++ kernels were not built (no compiler at install?): computing with torch's ops instead")
        return None
    levels = available_levels()
    if wanted is not None and wanted not in levels:
        raise UnknownOptionError(_LEVEL_VARIABLE, wanted, [*levels, "torch"])
    return _kernels_of(wanted or levels[0], torch.get_num_threads(), dtype)


@cache
def _kernels_of(level: str, num_threads: int, dtype: torch.dtype) -> NativeKernels:
    return NativeKernels(level, num_threads, dtype)


@cache
def _say_once(warning: str) -> None:
    logger.warning(warning)


def is_built() -> bool:
    """Return whether the C++ kernels were built, which takes a compiler when Octavo is installed."""
    return find_spec("octavo.kernels.cpu._cpu") is not None


def available_levels() -> list[str]:
    """Return the ISA levels of this processor, best first."""
    from octavo.kernels.cpu import _cpu

    return _cpu.levels()


def describe_level() -> str:
    """Return which C++ kernels run on this processor, and why these."""
    wanted = os.environ.get(_LEVEL_VARIABLE)
    if wanted == "torch":
        return f"torch's ops: {_LEVEL_VARIABLE} says so"
    if not is_built():
        return "torch's ops: the C++ kernels were not built (no compiler at install)"
    levels = available_levels()
    has = f"this processor has {', '.join(levels)}"
    if wanted is None:
        return f"{levels[0]}, the best that there is: {has}"
    return f"{wanted}: {_LEVEL_VARIABLE} says so; {has}" if wanted in levels else f"none: {wanted} is not here, {has}"


def uses_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels run here: on a GPU unless disabled, on a CPU if requested and interpreted."""
    wanted = os.environ.get(_GPU_VARIABLE)
    if wanted not in (None, "triton", "torch"):
        raise UnknownOptionError(_GPU_VARIABLE, wanted, ["triton", "torch"])
    if dtype not in _DTYPES or device.type not in ("cuda", "cpu"):
        return False
    if device.type == "cpu":
        return wanted == "triton" and _prepare_interpreter()
    return wanted != "torch" and _has_triton()


@cache
def _has_triton() -> bool:
    if find_spec("triton") is not None:
        return True
    _say_once("Triton is not installed: computing with torch's ops instead, several times slower")
    return False


def _prepare_interpreter() -> bool:
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        why = "on a CPU it needs Triton installed, and TRITON_INTERPRET=1"
        raise InvalidParameterError(_GPU_VARIABLE, "triton", why)
    from octavo.kernels.triton import interpreter

    interpreter.repair()
    return True
