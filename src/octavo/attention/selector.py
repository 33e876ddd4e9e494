"""Selects an attention backend. Triton's is imported only where it is selected."""

from typing import Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.native import NativeAttention
from octavo.attention.torch_sdpa import SdpaAttention
from octavo.attention.torch_tiled import TiledAttention
from octavo.config.engine import KVCacheDType
from octavo.errors import InvalidParameterError, UnknownOptionError
from octavo.kernels.dispatch import native_kernels, select_kernels, uses_triton

_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FIRST_WITH_FP8 = (8, 9)  # compute capability


def select_attention(
    device: torch.device,
    dtype: torch.dtype,
    name: str = "auto",
    kv_cache_dtype: KVCacheDType = "auto",
    *,
    is_exact: bool = True,
) -> AttentionBackend[Any]:
    """Return the backend called `name`. "auto": batch-invariant if `is_exact`, as the rest is; else the fastest.

    Keys and values are stored in the model's dtype ("auto") or in `kv_cache_dtype`.
    """
    native = native_kernels(dtype) if device.type == "cpu" else None
    here = [*["native"] * (native is not None), "tiled", "sdpa", *["triton"] * uses_triton(device, dtype)]
    if name == "auto":
        torch_s = "tiled" if (device.type, dtype) == ("cpu", torch.float32) else "sdpa"
        name = next(best for best in ("triton", "native", torch_s) if best in here)
    if name not in here:
        raise UnknownOptionError("attention backend", name, ["auto", *here])
    kv_dtype = _kv_dtype(device, dtype, kv_cache_dtype, name)
    if name == "triton":
        from octavo.attention.triton_paged import TritonAttention

        return TritonAttention(dtype, kv_dtype, is_exact=is_exact)
    if name == "native" and native is not None:
        return NativeAttention(native, dtype, kv_dtype)
    return (TiledAttention if name == "tiled" else SdpaAttention)(select_kernels(device, dtype), dtype)


def _kv_dtype(device: torch.device, dtype: torch.dtype, wanted: KVCacheDType, backend: str) -> torch.dtype:
    if wanted == "int8" and backend != "native":
        raise InvalidParameterError("kv_cache_dtype", wanted, "needs the C++ attention, on a CPU")
    if wanted == "fp8" and (backend != "triton" or not _has_fp8(device)):
        limit = "needs Triton's attention, on a GPU from Ada or Hopper on"
        raise InvalidParameterError("kv_cache_dtype", wanted, limit)
    if wanted == "bf16" and dtype != torch.bfloat16:
        raise InvalidParameterError("kv_cache_dtype", wanted, f"auto, int8 or fp8 for a model that computes in {dtype}")
    return _KV_DTYPES.get(wanted, dtype)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8
