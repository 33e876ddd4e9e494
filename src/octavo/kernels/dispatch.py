"""`select_kernels`: who computes the ops of layers, on a device and in a dtype. Stands above all kernels."""

from importlib import import_module

import torch

from octavo.errors import InvalidParameterError
from octavo.kernels.reference import Kernels
from octavo.kernels.triton.selection import uses_triton

_NATIVE_DTYPES = frozenset({torch.bfloat16, torch.float32})
_REFERENCE = ("octavo.kernels.reference", "Kernels")
# Kernels of a CPU, where oneDNN computes with the dtype. All else is computed by the reference, wherever torch runs.
_ONEDNN = {
    torch.float32: ("octavo.kernels.cpu_float32", "Float32CpuKernels"),
    torch.bfloat16: ("octavo.kernels.cpu_half", "HalfCpuKernels"),
    torch.float16: ("octavo.kernels.cpu_half", "HalfCpuKernels"),
}


def select_kernels(
    device: torch.device, dtype: torch.dtype, quantization: str | None = None, *, deterministic: bool = False
) -> Kernels:
    """Return the best kernels there are for this device and dtype, and for weights that they are to quantize.

    With `deterministic`, batch-invariant ones are preferred to faster ones; whether they are is theirs to say.

    Raises:
        InvalidParameterError: there is no such quantization, or none here.
    """
    if quantization is not None:
        return _quantized_kernels(device, dtype, quantization, deterministic=deterministic)
    if uses_triton(device, dtype):
        from octavo.kernels.triton.deterministic import DeterministicKernels
        from octavo.kernels.triton.kernels import TritonKernels

        return DeterministicKernels() if deterministic else TritonKernels()
    if device.type == "cpu" and dtype in _NATIVE_DTYPES:
        from octavo.kernels.native_level import native_kernels

        if (native := native_kernels(dtype)) is not None:
            return native
    module, class_name = _ONEDNN[dtype] if device.type == "cpu" and _has_onednn(dtype) else _REFERENCE
    kernels: Kernels = getattr(import_module(module), class_name)()
    return kernels


def _quantized_kernels(device: torch.device, dtype: torch.dtype, name: str, *, deterministic: bool) -> Kernels:
    from octavo.kernels.native_level import native_kernels
    from octavo.kernels.quantization import get_quantization

    quantization = get_quantization(name)
    if uses_triton(device, dtype):
        from octavo.kernels.triton.quantized import QuantizedKernels

        return QuantizedKernels(quantization, deterministic=deterministic)
    plain = native_kernels() if (device.type, dtype) == ("cpu", torch.bfloat16) else None
    if plain is None:
        here = f"here it is {device.type} with {str(dtype).removeprefix('torch.')}"
        on_cpu = "a CPU, bfloat16, and Octavo's C++ kernels built and not switched off"
        raise InvalidParameterError("quantization", name, f"needs {on_cpu}, or a GPU and Triton; {here}")
    from octavo.kernels.native_integers import IntegerNativeKernels

    return IntegerNativeKernels(plain, quantization)


def _has_onednn(dtype: torch.dtype) -> bool:
    from octavo.kernels import onednn

    return onednn.is_supported(dtype)
