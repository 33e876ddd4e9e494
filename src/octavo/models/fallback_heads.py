"""What attention of the library's models needs to become ours, where it is no plain call of the library's interface.

Keys and values of different sizes are padded with zeros. ALiBi (arXiv:2108.12409) adds slope * position of the key to
a score: the product of a few more elements of queries and keys, so no kernel knows of it. Classes with attention of
their own get a `forward` that calls the interface.

Legend: T = tokens, H = query heads, G = kv heads, E = size of cached heads.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from octavo.errors import UnsupportedModelError

Attention = Callable[..., tuple[torch.Tensor, None]]
Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [1, T, ...]
# Positions are 256 * a + b, which every dtype has exactly; slopes are the sums of two numbers of the dtype.
_STEP, _NUM_ALIBI = 256, 4
_TWO = torch.ones(1, 2, device="cpu")  # a mask of two tokens: the second one's bias is the slope


class HasRotaryPositions(Protocol):
    """The step that runs."""

    rotary_positions: torch.Tensor  # [T]


def head_width(query: torch.Tensor, value: torch.Tensor, alibi: torch.Tensor | None) -> int:
    """Return E for queries and values [1, H or G, T, ...], with ALiBi's slopes or without."""
    return max(query.shape[3] + _NUM_ALIBI * (alibi is not None), value.shape[3])


def joined_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    width: int,
    alibi: torch.Tensor | None,  # [H] float32: slopes of positions, beside queries times keys without their scale
    positions: torch.Tensor,  # [T]
) -> torch.Tensor:
    """Return the heads of each token side by side, [T, H + 2 * G, E]."""
    if alibi is not None:
        high = alibi.to(query.dtype)
        low = (alibi - high.float()).to(query.dtype)
        slopes = torch.stack([_STEP * high, _STEP * low, high, low], dim=1)  # [H, 4]
        steps, rest = positions.div(_STEP, rounding_mode="floor"), positions % _STEP
        places = torch.stack([steps, steps, rest, rest], dim=1).to(key.dtype)  # [T, 4]
        query = torch.cat([query, slopes[None, :, None].expand(*query.shape[:3], -1)], dim=3)
        key = torch.cat([key, places.expand(*key.shape[:3], -1)], dim=3)
    padded = (nn.functional.pad(heads[0], (0, width - heads.shape[3])) for heads in (query, key, value))
    return torch.cat([heads.transpose(0, 1) for heads in padded], dim=1)


def replace_own_attention(model: nn.Module, attention: Attention) -> bool:
    """Have modules with attention of their own, of classes known here, call `attention`; return whether there are."""
    known = [(module, _FORWARD.get(type(module).__name__)) for module in model.modules()]
    for module, forward in known:
        if forward is not None:
            module.forward = partial(forward, module, attention)
    return any(forward is not None for _, forward in known)


def longrope(config: Any) -> dict[str, Any] | None:
    """Return what the library's text configuration says of LongRoPE; None: its angles are of another kind."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return rope if rope.get("rope_type") == "longrope" else None


def angles_by_request(
    forward: Callable[..., Angles],
    step: HasRotaryPositions,
    num_short: int,
    num_positions: int,
    x: torch.Tensor,
    position_ids: torch.Tensor,  # [1, T]
) -> Angles:
    """Stand for a rotary embedding's `forward`, which chooses the range by the largest position of all.

    Tokens of requests that stay within the first range have its angles, all others those of long contexts, whoever else
    is in the step. The first ones' rotary positions are `num_positions` and more.
    """
    last = position_ids.new_full((1, 1), num_positions - 1)
    cos, sin = (part[:, :-1] for part in forward(x, torch.cat([position_ids, last], dim=1)))
    chosen = (step.rotary_positions >= num_positions)[None, :, None]
    if chosen.any():
        short_cos, short_sin = forward(x, position_ids.clamp(max=num_short - 1))
        cos, sin = torch.where(chosen, short_cos, cos), torch.where(chosen, short_sin, sin)
    return cos, sin


def _bloom(module: Any, attention: Attention, hidden: torch.Tensor, residual: torch.Tensor, **_: Any) -> Any:
    query, key, value = module._reshape(module.query_key_value(hidden))
    slopes = _library_of(module)._get_alibi_slopes(module.num_heads, torch.device("cpu")).to(hidden.device)
    scale = module.inv_norm_factor
    found, _weights = attention(module, query, key, value, scaling=scale, alibi=slopes / scale)
    return module.dense(found.flatten(2)) + residual, None


def _falcon(
    module: Any,
    attention: Attention,
    hidden: torch.Tensor,
    alibi: torch.Tensor | None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> Any:
    query, key, value = (heads.transpose(1, 2) for heads in module._split_heads(module.query_key_value(hidden)))
    repeated = key.shape[1] // module.num_kv_heads
    key, value = key[:, ::repeated], value[:, ::repeated]
    options: dict[str, Any] = {}
    if position_embeddings is not None and alibi is None:
        query, key = _library_of(module).apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        slopes = _library_of(module).build_alibi_tensor(_TWO, module.num_heads, torch.float32)[:, 0, 1]
        if (slopes.log2() % 1).any():
            raise UnsupportedModelError(f"Falcon's ALiBi with {module.num_heads} heads: powers of two are expected")
        options = {"alibi": slopes.to(hidden.device), "rounds_positions": True}
    found, _weights = attention(module, query, key, value, scaling=module.inv_norm_factor, **options)
    return module.dense(found.flatten(2)), None


def _library_of(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


_FORWARD: dict[str, Callable[..., Any]] = {"BloomAttention": _bloom, "FalconAttention": _falcon}
