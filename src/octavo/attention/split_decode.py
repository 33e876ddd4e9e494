"""Decoding over a long context on a CPU: attend to its tiles as a batch, then merge them by their sums of weights.

torch's fused kernel walks the slots of one kv head after another. They are G * D values apart, and beyond some 500
positions their cache lines evict each other. Tiles of 64 positions as one batch took two thirds of the time from 1,000
positions on, and the same time at 500 (one core, bfloat16, G * D = 1024).

Source of the merge: Dao et al. 2023, Flash-Decoding; Rabe and Staats 2021, arXiv:2112.05682.

Legend: H = query heads, G = kv heads, D = head size, C = context positions, N = tiles, W = tile width.
"""

import torch
from torch import Tensor

_TILE_WIDTH = 64
_SHORTEST_CONTEXT = 640


def is_worthwhile(query: Tensor, context_len: int) -> bool:
    """Return whether tiles are faster for this query and context length."""
    return query.device.type == "cpu" and context_len >= _SHORTEST_CONTEXT


def attend_in_tiles(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with query [1, H, 1, D] to all of keys and values [1, G, C, D]; return [1, H, 1, D]."""
    num_tiled = keys.shape[2] // _TILE_WIDTH * _TILE_WIDTH
    outs, log_sums = _attend(query, _tiles(keys, num_tiled), _tiles(values, num_tiled), scale)
    if num_tiled < keys.shape[2]:
        rest = _attend(query, keys[:, :, num_tiled:], values[:, :, num_tiled:], scale)
        outs, log_sums = torch.cat((outs, rest[0])), torch.cat((log_sums, rest[1]))
    shares = log_sums.softmax(dim=0).unsqueeze(-1)  # [N, H, 1, 1], each tile's share of the weights
    return (outs * shares).sum(dim=0, keepdim=True).to(query.dtype)


def _tiles(kv: Tensor, num_tiled: int) -> Tensor:
    """Return the first N * W positions of [1, G, C, D] as a view [N, G, W, D]."""
    slots_first = kv[0].transpose(0, 1)[:num_tiled]  # [N * W, G, D]
    return slots_first.view(-1, _TILE_WIDTH, *slots_first.shape[1:]).transpose(1, 2)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to each of N tiles [N, G, W, D]; return [N, H, 1, D] and the logarithms of summed weights [N, H, 1]."""
    queries = query.expand(len(keys), -1, -1, -1)
    # The op that implements scaled_dot_product_attention, which does not return the sums.
    outs, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, scale=scale)
    return outs, log_sums
