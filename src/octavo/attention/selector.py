"""Selects an attention backend from a registry, so that only the selected one is imported."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.config.engine import KVCacheDType
from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.kernels.dispatch import select_kernels, uses_triton

if TYPE_CHECKING:
    from octavo.kernels.native import NativeKernels

_BACKENDS = {
    "native": ("octavo.attention.native", "NativeAttention"),
    "tiled": ("octavo.attention.torch_tiled", "TiledAttention"),
    "sdpa": ("octavo.attention.torch_sdpa", "SdpaAttention"),
    "triton": ("octavo.attention.triton_paged", "TritonAttention"),
}
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FIRST_WITH_FP8 = (8, 9)  # compute capability


def select_attention(
    device: torch.device, dtype: torch.dtype, name: str = "auto", kv_cache_dtype: KVCacheDType = "auto"
) -> AttentionBackend[Any]:
    """Return the backend called `name`. "auto": batch-invariant if the rest of the model is, otherwise the fastest.

    Keys and values are stored in the model's dtype ("auto") or in `kv_cache_dtype`.

    Raises:
        UnknownOptionError: no such backend here; the message lists the available ones.
        InvalidParameterError: the backend does not support this `kv_cache_dtype`.
    """
    native, has_triton = _native_kernels(device, dtype), uses_triton(device, dtype)
    is_here = {"native": native is not None, "triton": has_triton}
    here = [known for known in _BACKENDS if is_here.get(known, True)]
    if name == "auto":
        tiled_or_sdpa = "tiled" if (device.type, dtype) == ("cpu", torch.float32) else "sdpa"
        native_or_torch = "native" if native is not None else tiled_or_sdpa
        name = "triton" if has_triton else native_or_torch
    if name not in here:
        raise UnknownOptionError("attention backend", name, ["auto", *here])
    module, class_name = _BACKENDS[name]
    make = getattr(import_module(module), class_name)
    kv_dtype = _kv_dtype(device, dtype, kv_cache_dtype, name)
    arguments: dict[str, tuple[Any, ...]] = {"native": (native, dtype, kv_dtype), "triton": (dtype, kv_dtype)}
    backend: AttentionBackend[Any] = (
        make(*arguments[name]) if name in arguments else make(select_kernels(device, dtype), dtype)
    )
    return backend


def _kv_dtype(device: torch.device, dtype: torch.dtype, wanted: KVCacheDType, backend: str) -> torch.dtype:
    if wanted == "int8" and backend != "native":
        raise InvalidParameterError("kv_cache_dtype", wanted, "needs the C++ attention: bfloat16 or float32 on a CPU")
    if wanted == "fp8" and (backend != "triton" or not _has_fp8(device)):
        raise InvalidParameterError(
            "kv_cache_dtype", wanted, "needs Triton's attention, on a GPU from Ada or Hopper on"
        )
    if wanted == "bf16" and dtype != torch.bfloat16:
        raise InvalidParameterError("kv_cache_dtype", wanted, f"auto, int8 or fp8 for a model that computes in {dtype}")
    return _KV_DTYPES.get(wanted, dtype)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def _native_kernels(device: torch.device, dtype: torch.dtype) -> "NativeKernels | None":
    """Return the C++ kernels if they support attention in this dtype."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    from octavo.kernels.dispatch import native_kernels

    return native_kernels(dtype)
