"""The choice of an attention backend: a registry, so that only the one chosen is imported."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.config.engine import KVCacheDType
from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.kernels.dispatch import select_kernels

if TYPE_CHECKING:
    from octavo.kernels.native import NativeKernels

_BACKENDS = {
    "native": ("octavo.attention.native", "NativeAttention"),
    "tiled": ("octavo.attention.torch_tiled", "TiledAttention"),
    "sdpa": ("octavo.attention.torch_sdpa", "SdpaAttention"),
}


def select_attention(
    device: torch.device, dtype: torch.dtype, name: str = "auto", kv_cache_dtype: KVCacheDType = "auto"
) -> AttentionBackend[Any]:
    """Return the backend called `name`. "auto": row-invariant where the rest of the model is, otherwise the fastest.

    Keys and values are kept in the model's dtype ("auto"), or in the one that `kv_cache_dtype` names.

    Raises:
        UnknownOptionError: no such backend here; the message names those there are.
        InvalidParameterError: the backend does not keep keys and values so.
    """
    native = _native_kernels(device, dtype)
    here = [known for known in _BACKENDS if known != "native" or native is not None]
    if name == "auto":
        tiled_or_sdpa = "tiled" if (device.type, dtype) == ("cpu", torch.float32) else "sdpa"
        name = "native" if native is not None else tiled_or_sdpa
    if name not in here:
        raise UnknownOptionError("attention backend", name, ["auto", *here])
    module, class_name = _BACKENDS[name]
    make = getattr(import_module(module), class_name)
    kv_dtype = _kv_dtype(dtype, kv_cache_dtype, has_int8=name == "native")
    backend: AttentionBackend[Any] = (
        make(native, dtype, kv_dtype) if name == "native" else make(select_kernels(device, dtype), dtype)
    )
    return backend


def _kv_dtype(dtype: torch.dtype, wanted: KVCacheDType, *, has_int8: bool) -> torch.dtype:
    if wanted == "int8" and not has_int8:
        raise InvalidParameterError("kv_cache_dtype", wanted, "needs the C++ attention: bfloat16 or float32 on a CPU")
    if wanted == "bf16" and dtype != torch.bfloat16:
        raise InvalidParameterError("kv_cache_dtype", wanted, f"auto or int8 for a model that computes in {dtype}")
    return torch.int8 if wanted == "int8" else dtype


def _native_kernels(device: torch.device, dtype: torch.dtype) -> "NativeKernels | None":
    """Return the C++ kernels where they compute attention in this dtype."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    from octavo.kernels.native import native_kernels

    return native_kernels()
