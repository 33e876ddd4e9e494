"""Mistral (Jiang et al. 2023, arXiv:2310.06825), one window for all layers or none; Mixtral (arXiv:2401.04088).

Mistral Small 3.1 and later have Pixtral for images before it, which is left out. Ministral 3 (2025) has YaRN, and
queries that grow with their position.

GGUF files have both under Llama's name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.family import (
    DECODER_NAMES,
    Family,
    GgufFacts,
    GgufKeys,
    Layers,
    MoEFacts,
    expert_names,
    stacked_experts,
)
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.layers import QueryGrowth

_RATE = "llama_4_scaling_beta"
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0}


def _read_growing(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    """Read the layers; queries have a table of their own."""
    if not {"rope_parameters", "rope_scaling"} & fields.values.keys():
        fields = fields.with_key("rope_parameters", {**_YARN, "mscale_all_dim": 1.0, _RATE: 0.1})
    stated = next(each for key in ("rope_parameters", "rope_scaling") if (each := fields.nested(key)).values)
    known = without_keys(fields, _RATE, "max_position_embeddings")
    layers, [table] = read_layers(known, family, max_position_embeddings)
    if _RATE not in stated:
        return layers, (table,)
    interval = stated.integer("original_max_position_embeddings", max_position_embeddings)
    growth = QueryGrowth(rate=stated.number(_RATE), interval=interval)
    growing = replace(table, rope=replace(table.rope, growth=growth))
    return tuple(layer.with_attention(query_rotary=1) for layer in layers), (table, growing)


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    """Translate; files have Mistral Small 3.1 and 3.2 under this name, too, without YaRN and growth."""
    rope = dict(so_far["rope_parameters"])
    if rope["rope_type"] == "yarn" and (
        times := keys.number("rope.scaling.yarn_log_multiplier", 0.0, can_be_zero=True)
    ):
        rope |= {"mscale": 1.0, "mscale_all_dim": times, "attention_factor": None}
    if rate := keys.number("attention.temperature_scale", 0.0, can_be_zero=True):
        rope[_RATE] = rate
    return {"rope_parameters": {key: value for key, value in rope.items() if value is not None}}


_MOE = "model.layers.{layer}.block_sparse_moe"
_EXPERT = _MOE + ".experts.{expert}"

FAMILIES = (
    Family(
        name="MistralForCausalLM",
        model_type="mistral",
        num_kv_heads=8,
        window_rule="all_layers",
        qkv_bias=False,
        gguf=GgufFacts(
            architecture="llama",
            fits=lambda keys: bool(keys.values.get("attention.sliding_window")) and not keys.values.get("expert_count"),
            interleaves_rows=True,
            is_written=True,
        ),
    ),
    Family(
        name="Ministral3ForCausalLM",
        model_type="ministral3",
        read_layers=_read_growing,
        num_kv_heads=8,
        head_dim=128,
        window_rule="all_layers",
        window=None,
        qkv_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        gguf=GgufFacts(
            architecture="mistral3",
            settings=_gguf_settings,
            own_keys=frozenset({"rope.scaling.yarn_log_multiplier"}),
            interleaves_rows=True,
        ),
    ),
    Family(
        name="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        is_nested=True,
        text=("MistralForCausalLM", "Ministral3ForCausalLM"),
        left_out=("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."),
    ),
    Family(
        name="MixtralForCausalLM",
        model_type="mixtral",
        weight_names={**DECODER_NAMES, **expert_names(f"{_MOE}.gate", _EXPERT, "w1", "w3", "w2")},
        other_spellings={
            "model.layers.{layer}.mlp.gate.weight": (f"{_MOE}.gate.weight",),
            **stacked_experts(_EXPERT, "w1", "w3", "w2"),
        },
        num_kv_heads=8,
        window_rule="all_layers",
        window=None,
        qkv_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        moe=MoEFacts(num_experts=8, top_k=2, always_renormalizes=True, has_dense_layers=False),
        gguf=GgufFacts(
            architecture="llama",
            fits=lambda keys: bool(keys.values.get("expert_count")),
            names={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
            },
            interleaves_rows=True,
            is_written=True,
        ),
    ),
)
