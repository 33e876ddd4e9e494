"""From a layer's projection to what torch backends attend with: heads, normalized and rotated.

Legend: T = tokens, H = query heads, G = kv heads, E = head size.
"""

import torch

from octavo.attention.base import AttentionLayer
from octavo.kernels.reference import Kernels


def split_heads(
    qkv: torch.Tensor,  # [T, (H + 2 * G) * E]
    cos: torch.Tensor,  # [T, E / 2] float32
    sin: torch.Tensor,  # [T, E / 2] float32
    layer: AttentionLayer,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query [T, H, E], key [T, G, E] and value [T, G, E]."""
    counts = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    query, key, value = qkv.view(len(qkv), -1, layer.head_dim).split_with_sizes(counts, dim=1)
    if layer.norms is not None:
        query = kernels.rms_norm(query, layer.norms.query, layer.norms.eps)
        key = kernels.rms_norm(key, layer.norms.key, layer.norms.eps)
    return kernels.rotary(query, cos, sin), kernels.rotary(key, cos, sin), value
