"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms behind each branch; layers without a window do not rotate."""

from collections.abc import Mapping
from typing import Any

from octavo.config.families.gemma3 import gguf_layer_types
from octavo.config.family import (
    DECODER_NAMES,
    GGUF_POST_NORM_NAMES,
    HEAD_NORM_NAMES,
    POST_NORM_NAMES,
    Family,
    GgufFacts,
    GgufKeys,
    Layers,
)
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import AttentionSpec


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str) or pattern == 0:  # LLLG, whose length counts; 0: there is no window
        fields = fields.with_key("sliding_window_pattern", len(pattern) if isinstance(pattern, str) else None)
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    if "sliding_window" in fields.nulls:
        return layers, rotary
    windows = [layer.mixer.sliding_window for layer in layers if isinstance(layer.mixer, AttentionSpec)]
    return tuple(
        layer if windows[at] is not None else layer.with_attention(rotary=None) for at, layer in enumerate(layers)
    ), rotary


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    if not so_far["sliding_window"]:
        return {"sliding_window": None}
    return {"layer_types": gguf_layer_types(keys, keys.integer("block_count"), 4)}


FAMILIES = (
    Family(
        name="Exaone4ForCausalLM",
        model_type="exaone4",
        read_layers=_read_layers,
        weight_names={**DECODER_NAMES, **HEAD_NORM_NAMES, **POST_NORM_NAMES},
        window_rule="pattern",
        head_norms="each",
        qkv_bias=False,
        norms="after",
        rms_norm_eps=1e-5,
        defaults={"sliding_window_pattern": 4},
        gguf=GgufFacts(architecture="exaone4", names=GGUF_POST_NORM_NAMES, settings=_gguf_settings),
    ),
)
