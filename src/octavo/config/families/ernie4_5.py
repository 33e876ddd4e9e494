"""ERNIE 4.5 (Baidu 2025), dense and with experts: adjacent pairs are rotated.

Experts are chosen by corrected shares of softmax; some of them are shared.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.families.deepseek import GGUF_FURTHER_NAMES
from octavo.config.family import DECODER_NAMES, Family, GgufFacts, GgufKeys, Layers, expert_names, stacked_experts
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.layers import ExpertsSpec, RoutingSpec

_ROUTING = RoutingSpec(has_correction=True, gates_shared=False)


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    has_bias = fields.flag("use_bias", False)
    fields = fields.with_key("attention_bias", has_bias).with_key("mlp_bias", has_bias)
    return read_layers(fields, family, max_position_embeddings)


def _read_with_experts(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    if fields.flag("use_bias", False):
        raise fields.unsupported("use_bias", " where layers have experts")
    layers, rotary = read_layers(without_keys(fields, "num_experts"), family, max_position_embeddings)
    inner, num_experts, top_k = (
        fields.integer(key, default)
        for key, default in (("moe_intermediate_size", 1536), ("moe_num_experts", 64), ("moe_k", 6))
    )
    if top_k > num_experts:
        raise fields.fail("moe_k", f"at most as many as there are experts ({num_experts})")
    experts = ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_intermediate_size=fields.integer("moe_num_shared_experts", 2, minimum=0) * inner or None,
        renormalizes=True,
        routing=_ROUTING,
    )
    first, every = fields.integer("moe_layer_start_index", 1, minimum=0), fields.integer("moe_layer_interval", 1)
    last = len(layers) - 1
    if fields.values.get("moe_layer_end_index", -1) != -1:
        last = fields.integer("moe_layer_end_index", minimum=0)
    return tuple(
        replace(layer, feed_forward=experts) if (at + 1) % every == 0 and first <= at <= last else layer
        for at, layer in enumerate(layers)
    ), rotary


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0, minimum=0),
    }


_MLP, _PLACE = "model.layers.{layer}.mlp", "layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"
_CORRECTION = f"{_MLP}.gate.e_score_correction_bias"

FAMILIES = (
    Family(
        name="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        read_layers=_read_layers,
        num_kv_heads=2,
        head_dim=128,
        rotates_pairs=True,
        has_mlp_bias_key=True,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        defaults={"tie_word_embeddings": True},
        gguf=GgufFacts(
            architecture="ernie4_5", settings=lambda keys, so_far: {"use_bias": "blk.0.attn_q.bias" in keys.tensors}
        ),
    ),
    Family(
        name="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        read_layers=_read_with_experts,
        left_out=("model.mtp",),
        weight_names={
            **DECODER_NAMES,
            **expert_names(f"{_MLP}.gate", _EXPERT),
            f"{_MLP}.shared_experts.gate_proj": f"{_PLACE}.shared_expert.gate_up:gate",
            f"{_MLP}.shared_experts.up_proj": f"{_PLACE}.shared_expert.gate_up:up",
            f"{_MLP}.shared_experts.down_proj": f"{_PLACE}.shared_expert.down",
        },
        other_spellings={
            f"{_MLP}.moe_statics.e_score_correction_bias": (_CORRECTION,),
            f"{_MLP}.gate.moe_statics.e_score_correction_bias": (_CORRECTION,),
            **stacked_experts(_EXPERT),
        },
        num_kv_heads=4,
        rotates_pairs=True,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        defaults={"tie_word_embeddings": True},
        gguf=GgufFacts(architecture="ernie4_5-moe", names=GGUF_FURTHER_NAMES, settings=_gguf_settings),
    ),
)
