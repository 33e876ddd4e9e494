"""`select_kernels`: which kernels compute the ops of layers, by device and dtype. Imports all kernels."""

from importlib import import_module

import torch

from octavo.kernels.quantization import WeightFormat
from octavo.kernels.reference import Kernels
from octavo.kernels.triton.selection import uses_triton

_NATIVE_DTYPES = frozenset({torch.bfloat16, torch.float32})
_REFERENCE = ("octavo.kernels.reference", "Kernels")
# CPU kernels by dtype, where oneDNN supports it. Everything else runs on the reference, wherever torch runs.
_ONEDNN = {
    torch.float32: ("octavo.kernels.cpu_float32", "Float32CpuKernels"),
    torch.bfloat16: ("octavo.kernels.cpu_half", "HalfCpuKernels"),
    torch.float16: ("octavo.kernels.cpu_half", "HalfCpuKernels"),
}

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
        return _triton_kernels(forms, deterministic=deterministic)
    if device.type == "cpu" and dtype in _NATIVE_DTYPES:
        from octavo.kernels.native_level import native_kernels

        if (native := native_kernels(dtype)) is not None:
            return native
    module, class_name = _ONEDNN[dtype] if device.type == "cpu" and _has_onednn(dtype) else _REFERENCE
    kernels: Kernels = getattr(import_module(module), class_name)()
    return kernels


def has_kernels(device: torch.device, dtype: torch.dtype, *, is_quantized: bool = False) -> bool:
    """Return whether layers of this dtype are computed by more than the reference; devices other than CPUs always do.

    oneDNN's kernels know dense weights only.
    """
    if device.type != "cpu":
        return True
    kernels = select_kernels(device, dtype)
    is_native = dtype in _NATIVE_DTYPES and kernels.records_calls
    return is_native or (not is_quantized and type(kernels) is not Kernels)


def _triton_kernels(forms: frozenset[WeightFormat | None], *, deterministic: bool) -> Kernels:
    from octavo.kernels.triton.deterministic import DeterministicKernels
    from octavo.kernels.triton.kernels import TritonKernels
    from octavo.kernels.triton.quantized import QuantizedKernels

    if forms != DENSE_ONLY:
        return QuantizedKernels(forms, deterministic=deterministic)
    return DeterministicKernels() if deterministic else TritonKernels()


def _has_onednn(dtype: torch.dtype) -> bool:
    from octavo.kernels import onednn

    return onednn.is_supported(dtype)
