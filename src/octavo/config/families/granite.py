"""Granite 3 and later, dense (IBM 2024): Llama with four multipliers."""

from collections.abc import Mapping
from typing import Any

from octavo.config.family import Family, GgufFacts, GgufKeys, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    scale = fields.number("attention_multiplier", 1.0)
    return tuple(layer.with_attention(scale=scale) for layer in layers), rotary


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


FAMILIES = (
    Family(
        name="GraniteForCausalLM",
        model_type="granite",
        read_layers=_read_layers,
        has_mlp_bias_key=True,
        has_multipliers=True,
        gguf=GgufFacts(architecture="granite", settings=_gguf_settings, interleaves_rows=True),
    ),
)
