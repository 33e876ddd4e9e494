"""Phi-3 and Phi-4 (Microsoft 2024, arXiv:2404.14219): Llama with fused weights; small ones rotate a part of each head.

LongRoPE (arXiv:2402.13753) has two lists of divisors. The long one is taken where more positions are served than the
model was trained with: which one applies does not depend on a request's length, so that cached keys stay valid.
"""

import math
from dataclasses import replace

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, Layers
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields

_LONG_KEYS = ("rope_type", "type", "long_factor", "short_factor", "factor", "attention_factor")
_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    stated = next((each for key in ("rope_parameters", "rope_scaling") if (each := fields.nested(key)).values), None)
    kind = "default" if stated is None else stated.text("rope_type", stated.text("type", "default"))
    if stated is None or kind not in ("longrope", "su", "yarn"):
        return read_layers(fields, family, max_position_embeddings)
    layers, [table] = read_layers(without_keys(fields, *_LONG_KEYS), family, max_position_embeddings)
    short, long = (stated.numbers(key, table.width // 2) for key in ("short_factor", "long_factor"))
    key = "original_max_position_embeddings"
    original = stated.integer(key, fields.integer(key, max_position_embeddings))
    factor = stated.number("factor", max_position_embeddings / original)
    own = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    rope = replace(
        table.rope,
        divisors=short,
        long_divisors=long,
        original_max_position=original,
        attention_factor=stated.number("attention_factor", own),
    )
    return layers, (replace(table, rope=rope),)


FAMILIES = (
    Family(
        name="Phi3ForCausalLM",
        model_type="phi3",
        read_layers=_read_layers,
        weight_names=DECODER_NAMES,
        other_spellings={
            f"{_ATTENTION}.qkv_proj.weight": tuple(f"{_ATTENTION}.{part}_proj.weight" for part in "qkv"),
            f"{_MLP}.gate_up_proj.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
        },
        gguf=GgufFacts(
            architecture="phi3",
            names={
                "attn_qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
                "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
            },
        ),
        window_rule="all_layers",
        window=None,
        qkv_bias=False,
        rms_norm_eps=1e-5,
        has_partial_rotary=True,
        is_length_scaled=True,
    ),
)
