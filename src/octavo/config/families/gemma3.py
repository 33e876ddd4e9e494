"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): norms around each branch, most layers with a window, SigLIP for images.

Of what GGUF files leave out, llama.cpp's own code knows the published models (`src/models/gemma3.cpp`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.family import DECODER_NAMES, HEAD_NORM_NAMES, SANDWICH_NORM_NAMES, Family, GgufFacts, GgufKeys
from octavo.config.hf_images import SIGLIP, read_plain_tower, read_token
from octavo.config.json_fields import JsonFields
from octavo.config.model import VisionConfig
from octavo.errors import CheckpointError


def _read_tower(fields: JsonFields, out_hidden_size: int) -> VisionConfig:
    """SigLIP whose patches are averaged, square by square, to a fixed number of tokens."""
    vision = fields.nested("vision_config")
    if vision.text("model_type", SIGLIP) != SIGLIP:
        raise vision.unsupported("model_type", f"; known: {SIGLIP}")
    tower = read_plain_tower(vision, out_hidden_size)
    num_tokens = fields.integer("mm_tokens_per_image", 256)
    tokens_per_side = math.isqrt(num_tokens)
    if tokens_per_side**2 != num_tokens or tower["position_grid"] % tokens_per_side:
        side = tower["position_grid"]
        raise fields.fail("mm_tokens_per_image", f"a square is expected whose side divides {side} patches")
    if "boi_token_index" in fields.nulls or "eoi_token_index" in fields.nulls:
        raise CheckpointError(f"{fields.origin}: boi_token_index and eoi_token_index are expected")
    return VisionConfig(
        spatial_merge_size=tower["position_grid"] // tokens_per_side,
        is_bidirectional=True,
        image_token_id=read_token(fields, "image_token", 262144),
        vision_start_token_id=read_token(fields, "boi_token", 255999),
        vision_end_token_id=read_token(fields, "eoi_token", 256000),
        text_around="\n\n",
        **tower,
    )


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, num_heads = keys.integer("block_count"), keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    local = keys.number("rope.freq_base_swa", 10000.0)
    return {
        "sliding_window": window or None,
        "layer_types": gguf_layer_types(keys, num_layers) if window else ["full_attention"] * num_layers,
        "rope_parameters": {
            "full_attention": so_far["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": gguf_attention_divisor(num_layers, hidden_size, num_heads, head_dim),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0, can_be_zero=True) or None,
    }


def gguf_attention_divisor(num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> int:
    """Return the number whose square root divides scores: it is not in the file, and differs for the 27B model."""
    return hidden_size // num_heads if num_layers == 62 else head_dim


def gguf_layer_types(keys: JsonFields, num_layers: int, every_default: int = 6) -> list[str]:
    """Return `layer_types`. A number n stands for n - 1 layers with a window and one without, over and over.

    Without a key, n is `every_default`.
    """
    key = "attention.sliding_window_pattern"
    pattern = keys.values.get(key, every_default)
    if not isinstance(pattern, list):
        every = keys.integer(key, every_default)
        pattern = [index % every < every - 1 for index in range(num_layers)]
    elif len(pattern) != num_layers:
        raise keys.fail(key, f"one entry for each of {num_layers} layers is expected")
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


_TEXT = Family(
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    weight_names={**DECODER_NAMES, **HEAD_NORM_NAMES, **SANDWICH_NORM_NAMES},
    num_kv_heads=4,
    head_dim=256,
    window_rule="pattern",
    head_norms="each",
    norm_offset=1.0,
    rope_theta=1e6,
    local_rope_theta=1e4,
    is_length_scaled=True,
    activation="gelu_tanh",
    norms="around",
    scales_embedding=True,
    has_attention_scale_key=True,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
    gguf=GgufFacts(
        architecture="gemma3",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        settings=_gguf_settings,
        is_written=True,
    ),
)
FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        name="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        model="octavo.models.gemma3:Gemma3ForConditionalGeneration",
        read_tower=_read_tower,
        gguf=None,
    ),
)
