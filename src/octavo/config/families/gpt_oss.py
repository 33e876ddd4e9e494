"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, every other layer with a window, experts with biases.

GGUF files do not say which layers have a window, what clamps the activation, nor that YaRN does not round its borders:
these are those of the published models.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, GgufKeys, Layers, MoEFacts, expert_names
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import ExpertsSpec

_LAYER = "model.layers.{layer}"
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    if "rope_scaling" not in fields:
        fields = fields.with_defaults({"rope_parameters": _YARN})
    plain, rotary = read_layers(fields, replace(family, read_layers=None), max_position_embeddings)
    limit, alpha = fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)
    layers = []
    for layer in plain:
        assert isinstance(layer.feed_forward, ExpertsSpec)
        experts = structs.replace(
            layer.feed_forward, has_bias=True, has_router_bias=True, swiglu_limit=limit, swiglu_alpha=alpha
        )
        layers.append(replace(layer.with_attention(has_sinks=True), feed_forward=experts))
    return tuple(layers), rotary


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    rope = so_far["rope_parameters"]
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length", so_far["intermediate_size"]),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


FAMILIES = (
    Family(
        name="GptOssForCausalLM",
        model_type="gpt_oss",
        model="octavo.models.gpt_oss:GptOssForCausalLM",
        read_layers=_read_layers,
        weight_names={
            **DECODER_NAMES,
            f"{_LAYER}.self_attn": "layers.{layer}.attention.sinks",
            **expert_names(f"{_LAYER}.mlp.router", _LAYER + ".mlp.experts.{expert}"),
        },
        num_kv_heads=8,
        head_dim=64,
        window_rule="pattern",
        window=128,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 2,
            "attention_bias": True,
        },
        moe=MoEFacts(num_experts=128, top_k=4, always_renormalizes=True, has_dense_layers=False),
        gguf=GgufFacts(
            architecture="gpt-oss",
            names={
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks.weight": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            },
            settings=_gguf_settings,
            inner_ends=("<|end|>",),  # of a message, and an answer has several
            is_converted=False,
        ),
    ),
)
