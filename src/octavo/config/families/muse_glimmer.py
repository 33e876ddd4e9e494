"""Muse Glimmer (Meta 2026): gated attention, norms around branches, windows; layers without one do not rotate.

Its tower for images is left out.
"""

from collections.abc import Mapping
from typing import Any

from octavo.config.families.gemma3 import gguf_layer_types
from octavo.config.family import (
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    SANDWICH_NORM_NAMES,
    Family,
    GgufFacts,
    GgufKeys,
    Layers,
)
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields

_HEAD_NORMS = "has_qk_norm_weights"  # of GGUF files, whose weights are the factor


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    if fields.text("hidden_activation", "silu") != "silu":
        raise fields.unsupported("hidden_activation", "; known: silu")
    if fields.flag("attention_bias", False):
        raise fields.unsupported("attention_bias")
    num_layers = fields.integer("num_hidden_layers")
    if "layer_types" not in fields:
        kinds = ["sliding_attention", "full_attention"]
        fields = fields.with_key("layer_types", [kinds[(num_layers - 1 - at) % 4 == 0] for at in range(num_layers)])
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    rotates = fields.values.get("layer_rope_theta", [(num_layers - 1 - at) % 4 for at in range(num_layers)])
    if not isinstance(rotates, list) or len(rotates) != num_layers:
        raise fields.fail("layer_rope_theta", f"{num_layers} entries are expected")
    own = {
        "gate": "elements",
        "has_norm_weights": fields.flag(_HEAD_NORMS, False),
        "scale": fields.number("qk_scale_factor") * layers[0].attention.head_dim ** -0.5,
    }
    return tuple(
        layer.with_attention(**own, **({} if turns else {"rotary": None}))
        for layer, turns in zip(layers, rotates, strict=True)
    ), rotary


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    kinds = gguf_layer_types(keys, keys.integer("block_count"))
    return {
        "layer_types": kinds,
        "layer_rope_theta": [int(kind == "sliding_attention") for kind in kinds],
        "output_multiplier": keys.number("logit_scale"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "qk_scale_factor": 1.0,
        _HEAD_NORMS: True,
    }


FAMILIES = (
    Family(
        name="MuseGlimmerForConditionalGeneration",
        model_type="muse_glimmer",
        model="octavo.models.muse_glimmer:MuseGlimmerForCausalLM",
        read_layers=_read_layers,
        is_nested=True,
        left_out=tuple(f"model.{part}." for part in ("vision_tower", "vision_adapter", "vision_projection")),
        weight_names={
            **DECODER_NAMES,
            **HEAD_NORM_NAMES,
            **SANDWICH_NORM_NAMES,
            "model.layers.{layer}.self_attn.gate_proj": "layers.{layer}.attention.qkv:gate",
        },
        num_kv_heads=2,
        head_dim=128,
        window_rule="pattern",
        window=2048,
        head_norms="each",
        norms="around",
        norm_offset=1.0,
        rms_norm_eps=1e-5,
        post_norm_eps_key="post_norm_eps",
        logits_factor_key="output_multiplier",
        defaults={
            "output_multiplier": 0.19611613513818404,
            "final_logit_softcapping": 20.0,
            "post_norm_eps": 1e-8,
            "qk_scale_factor": 3.87,
            "sliding_window": 2048,
        },
        gguf=GgufFacts(
            architecture="muse-glimmer",
            names={
                "attn_gate": "self_attn.gate_proj",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
            settings=_gguf_settings,
            stored_norms=frozenset({"output_norm"}),
            interleaves_rows=True,
        ),
    ),
)
