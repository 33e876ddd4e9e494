"""The choice of an attention backend: a registry, so that only the one chosen is imported."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.errors import UnknownOptionError
from octavo.kernels.dispatch import select_kernels

if TYPE_CHECKING:
    from octavo.kernels.native import NativeKernels

_BACKENDS = {
    "native": ("octavo.attention.native", "NativeAttention"),
    "tiled": ("octavo.attention.torch_tiled", "TiledAttention"),
    "sdpa": ("octavo.attention.torch_sdpa", "SdpaAttention"),
}


def select_attention(device: torch.device, dtype: torch.dtype, name: str = "auto") -> AttentionBackend[Any]:
    """Return the backend called `name`. "auto": row-invariant where the rest of the model is, otherwise the fastest.

    Raises:
        UnknownOptionError: no such backend here; the message names those there are.
    """
    native = _native_kernels(device, dtype)
    here = [known for known in _BACKENDS if known != "native" or native is not None]
    if name == "auto":
        tiled_or_sdpa = "tiled" if (device.type, dtype) == ("cpu", torch.float32) else "sdpa"
        name = "native" if native is not None else tiled_or_sdpa
    if name not in here:
        raise UnknownOptionError("attention backend", name, ["auto", *here])
    module, class_name = _BACKENDS[name]
    kernels = native if name == "native" else select_kernels(device, dtype)
    backend: AttentionBackend[Any] = getattr(import_module(module), class_name)(kernels, dtype)
    return backend


def _native_kernels(device: torch.device, dtype: torch.dtype) -> "NativeKernels | None":
    """Return the C++ kernels where they compute attention in this dtype."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    from octavo.kernels.native import native_kernels

    return native_kernels()
