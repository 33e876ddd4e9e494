"""The KV tensors of a rank."""

import numpy as np
import torch

from octavo.attention.metadata import LayerKVCache
from octavo.contracts.kv_cache import KVCacheSpec


def allocate_kv_caches(
    spec: KVCacheSpec, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> list[LayerKVCache]:
    """Return one cache per layer, zeroed, so that an unwritten slot never holds a NaN."""
    shape = (num_blocks * spec.block_size, spec.num_kv_heads, spec.head_dim)
    return [
        LayerKVCache(key=_zeros(shape, dtype, device), value=_zeros(shape, dtype, device))
        for _ in range(spec.num_layers)
    ]


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes untouched zero pages from the system: blocks never used cost no memory, and start-up no time.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
