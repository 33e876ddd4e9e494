"""The choice of an attention backend: a registry, so that only the one chosen is imported."""

from importlib import import_module
from typing import Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.errors import UnknownOptionError
from octavo.kernels.dispatch import select_kernels

_BACKENDS = {
    "tiled": ("octavo.attention.torch_tiled", "TiledAttention"),
    "sdpa": ("octavo.attention.torch_sdpa", "SdpaAttention"),
}


def select_attention(device: torch.device, dtype: torch.dtype, name: str = "auto") -> AttentionBackend[Any]:
    """Return the backend called `name`. "auto": row-invariant where the rest of the model is, otherwise the fastest.

    Raises:
        UnknownOptionError: no such backend; the message names those there are.
    """
    if name == "auto":
        name = "tiled" if (device.type, dtype) == ("cpu", torch.float32) else "sdpa"
    if name not in _BACKENDS:
        raise UnknownOptionError("attention backend", name, ["auto", *_BACKENDS])
    module, class_name = _BACKENDS[name]
    make = getattr(import_module(module), class_name)
    backend: AttentionBackend[Any] = make(select_kernels(device, dtype), dtype)
    return backend
