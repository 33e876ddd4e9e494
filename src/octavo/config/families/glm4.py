"""GLM-4 (Z.ai 2024, arXiv:2406.12793), GLM-4-0414 and GLM-4.5 to 4.7 (arXiv:2508.06471): half of each head is rotated.

The dense ones rotate adjacent pairs, and have gates and ups in one tensor; those of 0414 have norms around each branch.
Experts are chosen as in DeepSeek V3.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.families.deepseek import GGUF_FURTHER_NAMES, read_feed_forwards
from octavo.config.family import (
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    Family,
    GgufFacts,
    GgufKeys,
    Layers,
    expert_names,
    stacked_experts,
)
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(without_keys(fields, "num_experts"), family, max_position_embeddings)
    norms = "each" if fields.flag("use_qk_norm", False) else None
    both = zip(layers, read_feed_forwards(fields), strict=True)
    return tuple(replace(layer.with_attention(head_norms=norms), feed_forward=after) for layer, after in both), rotary


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_hidden_layers": keys.integer("block_count") - keys.integer("nextn_predict_layers", 0, minimum=0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0, can_be_zero=True) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


_MLP, _PLACE = "model.layers.{layer}.mlp", "layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"


def _dense(name: str, model_type: str, norms: dict[str, str]) -> Family:
    return Family(
        name=name,
        model_type=model_type,
        weight_names={**DECODER_NAMES, **norms},
        other_spellings={f"{_MLP}.gate_up_proj.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")},
        num_kv_heads=2,
        head_dim=128,
        rotates_pairs=True,
        has_out_bias=False,
        norms="around" if norms else "before",
        rms_norm_eps=1.5625e-7,
        has_partial_rotary=True,
        defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "eos_token_id": [151329, 151336, 151338]},
        gguf=GgufFacts(
            architecture="glm4",
            names={
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
            },
        )
        if norms
        else None,
    )


FAMILIES = (
    _dense("GlmForCausalLM", "glm", {}),
    _dense(
        "Glm4ForCausalLM",
        "glm4",
        {
            "model.layers.{layer}.post_self_attn_layernorm": "layers.{layer}.post_attention_norm",
            "model.layers.{layer}.post_mlp_layernorm": "layers.{layer}.post_mlp_norm",
        },
    ),
    Family(
        name="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        read_layers=_read_layers,
        leaves_out_further_layers=True,
        weight_names={
            **DECODER_NAMES,
            **HEAD_NORM_NAMES,
            **expert_names(f"{_MLP}.gate", _EXPERT),
            f"{_MLP}.shared_experts.gate_proj": f"{_PLACE}.shared_expert.gate_up:gate",
            f"{_MLP}.shared_experts.up_proj": f"{_PLACE}.shared_expert.gate_up:up",
            f"{_MLP}.shared_experts.down_proj": f"{_PLACE}.shared_expert.down",
        },
        other_spellings=stacked_experts(_EXPERT),
        num_kv_heads=8,
        has_out_bias=False,
        rms_norm_eps=1e-5,
        has_partial_rotary=True,
        defaults={
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        gguf=GgufFacts(
            architecture="glm4moe",
            names={**GGUF_FURTHER_NAMES, "post_attention_norm": "post_attention_layernorm"},
            settings=_gguf_settings,
        ),
    ),
)
