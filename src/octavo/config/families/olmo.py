"""OLMo 2 (Allen AI 2024, arXiv:2501.00656), OLMo 3 (arXiv:2512.13961), OLMoE (arXiv:2409.02060): norms over all heads.

OLMo 2 and 3 have norms behind each branch; three of four layers of OLMo 3 have a window, and angles of their own.
"""

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
    MoEFacts,
    expert_names,
    stacked_experts,
)
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    clip = None if fields.values.get("clip_qkv") is None else fields.number("clip_qkv")
    return tuple(layer.with_attention(qkv_clip=clip) for layer in layers), rotary


def _has_window(keys: GgufKeys) -> bool:
    return bool(keys.values.get("attention.sliding_window"))


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    rope = so_far["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "layer_types": gguf_layer_types(keys, keys.integer("block_count"), 4),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


_NAMES = {**DECODER_NAMES, **HEAD_NORM_NAMES}
_MLP = "model.layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"

FAMILIES = (
    Family(
        name="Olmo2ForCausalLM",
        model_type="olmo2",
        weight_names={**_NAMES, **POST_NORM_NAMES},
        head_norms="whole",
        norms="after",
        rms_norm_eps=1e-5,
        gguf=GgufFacts(architecture="olmo2", fits=lambda keys: not _has_window(keys), names=GGUF_POST_NORM_NAMES),
    ),
    Family(
        name="Olmo3ForCausalLM",
        model_type="olmo3",
        weight_names={**_NAMES, **POST_NORM_NAMES},
        window_rule="pattern",
        head_norms="whole",
        norms="after",
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        local_rope_theta=5e5,
        defaults={"sliding_window_pattern": 4},
        gguf=GgufFacts(architecture="olmo2", fits=_has_window, names=GGUF_POST_NORM_NAMES, settings=_gguf_settings),
    ),
    Family(
        name="OlmoeForCausalLM",
        model_type="olmoe",
        read_layers=_read_layers,
        weight_names={**_NAMES, **expert_names(f"{_MLP}.gate", _EXPERT)},
        other_spellings=stacked_experts(_EXPERT),
        head_norms="whole",
        rms_norm_eps=1e-5,
        moe=MoEFacts(num_experts=64, top_k=8, has_dense_layers=False),
        gguf=GgufFacts(architecture="olmoe", settings=lambda keys, so_far: {"norm_topk_prob": False}),
    ),
)
