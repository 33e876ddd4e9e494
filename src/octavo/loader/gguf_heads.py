"""Tensors of linear attention as GGUF files have them: value heads that share a key head are not neighbors there.

In a file value head h uses key head h modulo their number, so that heads come in rounds, but for Qwen3-Next's; in
checkpoints the value heads of a key head are one after the other.
"""

import torch
from torch import Tensor

from octavo.config.layers import GatedDeltaSpec
from octavo.config.model import ModelConfig


def linear_attention_spec(config: ModelConfig) -> GatedDeltaSpec | None:
    """Return the spec of the layers with linear attention, which is the same for all; None: there are none."""
    return next((layer.mixer for layer in config.layers if isinstance(layer.mixer, GatedDeltaSpec)), None)


def as_in_checkpoints(part: str, values: Tensor, spec: GatedDeltaSpec, *, has_blocks: bool) -> Tensor:
    """Return a tensor as checkpoints have it; `part` is its name in a block of the file.

    Columns of quantized blocks stay where they are: the layer puts its inputs in their order.
    """
    if not spec.has_heads_in_rounds:
        return values
    keys = 2 * spec.num_key_heads * spec.key_size
    if part in ("attn_qkv", "ssm_conv1d"):
        return torch.cat((values[:keys], _neighbors(values[keys:], spec)))
    if part in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return _neighbors(values, spec)
    if part == "ssm_out" and not has_blocks:
        return _neighbors(values.T, spec).T
    return values


def _neighbors(rows: Tensor, spec: GatedDeltaSpec) -> Tensor:
    """Return rows [value heads * any, ...] with those of one key head one after the other."""
    rounds = spec.num_value_heads // spec.num_key_heads
    by_head = rows.reshape(rounds, spec.num_key_heads, -1, *rows.shape[1:])
    return by_head.transpose(0, 1).reshape(rows.shape)
