"""Llama 4 (Meta 2025): experts weighted before they compute, adjacent pairs rotated, attention in chunks of positions.

Layers that do not rotate see everything, and their queries grow with their position. The tower for images is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, GgufKeys, Layers, expert_names
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.layers import ExpertsSpec, QueryGrowth, RopeConfig, RotarySpec, RoutingSpec

_OWN_KEYS = ("layer_types", "num_local_experts", "num_experts", "intermediate_size")
_GROWING = 1  # the table of queries that are not rotated


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    plain = without_keys(fields, *_OWN_KEYS).with_key(
        "intermediate_size", fields.integer("intermediate_size_mlp", 16384)
    )
    layers, (table,) = read_layers(plain, family, max_position_embeddings)
    num_layers, head_dim = len(layers), layers[0].attention.head_dim
    every = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.integers("no_rope_layers") or [int((at + 1) % every != 0) for at in range(num_layers)]
    kinds = ["full_attention", "chunked_attention"]
    types = fields.texts("layer_types") if "layer_types" in fields else [kinds[bool(turns)] for turns in rotates]
    for key, found in (("no_rope_layers", rotates), ("layer_types", types)):
        if len(found) != num_layers:
            raise fields.fail(key, f"{num_layers} entries are expected")
    if unknown := set(types).difference(kinds):
        raise fields.fail("layer_types", f"{min(unknown)!r} is not known; known: {', '.join(kinds)}")
    chunk = None if "attention_chunk_size" in fields.nulls else fields.integer("attention_chunk_size", 8192)
    turned = {"head_norms": "each_behind" if fields.flag("use_qk_norm", True) else None, "has_norm_weights": False}
    growth = _growth(fields)
    still = {"rotary": None, "rotates_pairs": False, "query_rotary": None if growth is None else _GROWING}
    experts, sparse = _experts(fields), _sparse_layers(fields, num_layers)
    result = [
        layer.with_attention(**(turned if turns else still), chunk_size=chunk if kind == "chunked_attention" else None)
        for layer, turns, kind in zip(layers, rotates, types, strict=True)
    ]
    result = [replace(layer, feed_forward=experts) if at in sparse else layer for at, layer in enumerate(result)]
    growing = RopeConfig(divisors=(math.inf,) * (head_dim // 2), growth=growth)  # angles of 0
    return tuple(result), (table, *([] if growth is None else [RotarySpec(rope=growing, width=head_dim)]))


def _growth(fields: JsonFields) -> QueryGrowth | None:
    if not fields.values.get("attn_temperature_tuning", True):
        return None
    return QueryGrowth(rate=fields.number("attn_scale", 0.1), interval=fields.integer("floor_scale", 8192), offset=1)


def _sparse_layers(fields: JsonFields, num_layers: int) -> list[int]:
    """Return the numbers of layers with experts."""
    every = fields.integer("interleave_moe_layer_step", 1, minimum=0)
    stated = [*range(every - 1, num_layers, every)] if every else []
    return fields.integers("moe_layers") if "moe_layers" in fields else stated


def _experts(fields: JsonFields) -> ExpertsSpec:
    inner, num_experts = fields.integer("intermediate_size", 8192), fields.integer("num_local_experts", 16)
    top_k = fields.integer("num_experts_per_tok", 1)
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most as many as there are experts ({num_experts})")
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_intermediate_size=inner,
        renormalizes=False,
        routing=RoutingSpec(scores="sigmoid", gates_shared=False),
    )


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    """Files leave out what all of Meta's models have; a window of 0: each layer sees and rotates everything."""
    sees_all = keys.values.get("attention.sliding_window") == 0
    whole = {"no_rope_layers": [1] * keys.integer("block_count"), "attention_chunk_size": None}
    return {
        "intermediate_size_mlp": so_far["intermediate_size"],
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count", 1),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step", minimum=0),
        "use_qk_norm": keys.values.get("expert_count") != 128,  # Maverick has none
        "sliding_window": None,
        **(whole if sees_all else {}),
    }


_MLP, _PLACE = "model.layers.{layer}.feed_forward", "layers.{layer}.mlp"
_TEXT = Family(
    name="Llama4ForCausalLM",
    model_type="llama4_text",
    model="octavo.models.llama4:Llama4ForCausalLM",
    read_layers=_read_layers,
    weight_names={
        **{name.replace(".mlp.", ".feed_forward."): place for name, place in DECODER_NAMES.items()},
        **expert_names(f"{_MLP}.router", _MLP + ".experts.{expert}"),
        f"{_MLP}.shared_expert.gate_proj": f"{_PLACE}.shared_expert.gate_up:gate",
        f"{_MLP}.shared_expert.up_proj": f"{_PLACE}.shared_expert.gate_up:up",
        f"{_MLP}.shared_expert.down_proj": f"{_PLACE}.shared_expert.down",
    },
    num_kv_heads=8,
    head_dim=128,
    rotates_pairs=True,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    gguf=GgufFacts(
        architecture="llama4",
        names={
            "ffn_gate_inp": "feed_forward.router",
            **{
                f"ffn_{part}{ending}": f"feed_forward.{inner}{part}_proj"
                for part in ("gate", "up", "down")
                for ending, inner in (("", ""), ("_shexp", "shared_expert."), ("_exps", "experts.{expert}."))
            },
        },
        settings=_gguf_settings,
        is_converted=False,
    ),
)
FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        name="Llama4ForConditionalGeneration",
        model_type="llama4",
        gguf=None,
        is_nested=True,
        left_out=("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."),
    ),
)
