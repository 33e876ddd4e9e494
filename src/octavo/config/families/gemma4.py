"""Gemma 4: two sizes of heads, keys and values that layers share, embeddings per layer, experts beside the MLP.

Read from transformers' `Gemma4TextConfig`. Towers for images and sound are left out: only the language model is served.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from octavo.config.families.gemma3 import gguf_layer_types
from octavo.config.family import (
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    SANDWICH_NORM_NAMES,
    Family,
    GgufFacts,
    GgufKeys,
    Layers,
    expert_names,
    stacked_experts,
)
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import DenseSpec, ExpertsSpec, FeedForward, LayerSpec, RotarySpec

_LAYER, _EXPERT = "model.layers.{layer}", "model.layers.{layer}.experts.{expert}"
_FULL = 1  # `AttentionSpec.entry_kind` of layers without a window, whose heads are larger


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.unsupported("use_bidirectional_attention", "; it makes an encoder of the model")
    num_layers = fields.integer("num_hidden_layers")
    first_shared = num_layers - fields.integer("num_kv_shared_layers", 0, minimum=0)
    plain, width, divisors = _without_own_keys(fields), *_full_heads(fields)
    layers, (full, local) = read_layers(plain, family, max_position_embeddings)
    layers = (*layers[:-1], layers[-1].with_attention(sliding_window=None, rotary=0))  # the last one sees everything
    wide = {"head_dim": width, "entry_kind": _FULL, "num_kv_heads": _full_kv_heads(fields)}
    wide |= {"has_keys_as_values": fields.flag("attention_k_eq_v", False)}
    specs: list[LayerSpec] = []
    for number, layer in enumerate(layers):
        own = layer.with_attention(has_value_norm=True, scale=1.0)
        if own.attention.sliding_window is None:
            own = own.with_attention(**wide)
        is_shared = number >= first_shared
        if is_shared:
            own = own.with_attention(shares_kv_of=_donor(specs[:first_shared], own, fields))
        specs.append(replace(own, feed_forward=_feed_forward(fields, is_shared=is_shared)))
    tables = RotarySpec(rope=replace(full.rope, divisors=divisors), width=width), local
    return tuple(specs), tables


def _without_own_keys(fields: JsonFields) -> JsonFields:
    """Return the keys as other families have them: without experts, and with plain rotary settings."""
    rope = {kind: dict(_rope_of(fields, kind).values) for kind in ("full_attention", "sliding_attention")}
    kind = rope["full_attention"].pop("rope_type", "proportional")
    for key in ("partial_rotary_factor", "divisors"):
        rope["full_attention"].pop(key, None)
    if kind not in ("default", "proportional"):
        raise _rope_of(fields, "full_attention").unsupported("rope_type", "; known: default, proportional")
    dropped = ("num_experts", "rope_parameters", "use_bidirectional_attention")
    values = {key: value for key, value in fields.values.items() if key not in dropped}
    return JsonFields(fields.origin, {**values, "rope_parameters": rope})


def _rope_of(fields: JsonFields, kind: str) -> JsonFields:
    return fields.nested("rope_parameters").nested(kind)


def _full_heads(fields: JsonFields) -> tuple[int, tuple[float, ...]]:
    """Return the size of heads of layers without a window, and what the frequencies of their pairs are divided by.

    Only the first pairs are rotated, by the frequencies that they have if all are.
    """
    # transformers 5 writes neither key where layers of both kinds have heads of one size.
    usual = fields.integer("head_dim", 512) if "per_layer_config" in fields else 512
    width = _of_full_layers(fields, "head_dim", fields.integer("global_head_dim", usual))
    rope = _rope_of(fields, "full_attention")
    if "divisors" in rope:  # of a GGUF file
        return width, tuple(rope.values["divisors"])
    default = 1.0 if rope.text("rope_type", "proportional") == "default" else 0.25 if not rope.values else 1.0
    num_rotated = int(rope.number("partial_rotary_factor", default) * width // 2)
    return width, (1.0,) * num_rotated + (math.inf,) * (width // 2 - num_rotated)


def _full_kv_heads(fields: JsonFields) -> int:
    stated = fields.integer("num_key_value_heads")
    has_own = fields.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in fields
    count = fields.integer("num_global_key_value_heads") if has_own else stated
    count = _of_full_layers(fields, "num_key_value_heads", count)
    if fields.integer("num_attention_heads") % count:
        raise fields.fail("num_attention_heads", f"a multiple of num_global_key_value_heads ({count}) is expected")
    return count


def _of_full_layers(fields: JsonFields, key: str, default: int) -> int:
    """Return what transformers 5 writes for each layer without a window; absent in published files."""
    by_layer = fields.nested("per_layer_config")
    found = {by_layer.nested(number).integer(key, default) for number in by_layer.values}
    if len(found) > 1:
        raise fields.unsupported("per_layer_config", f": {key} differs among layers without a window")
    return found.pop() if found else default


def _donor(owners: list[LayerSpec], shared: LayerSpec, fields: JsonFields) -> int:
    """Return the last layer of the same kind that has keys and values of its own."""
    for number, layer in reversed(list(enumerate(owners))):
        if layer.attention.entry_kind == shared.attention.entry_kind:
            return number
    raise fields.fail("num_kv_shared_layers", "a layer of each kind with keys and values of its own is expected")


def _feed_forward(fields: JsonFields, *, is_shared: bool) -> FeedForward:
    times = 2 if is_shared and fields.flag("use_double_wide_mlp", False) else 1
    dense = DenseSpec(intermediate_size=times * fields.integer("intermediate_size"))
    if not fields.flag("enable_moe_block", False):
        return dense
    return ExpertsSpec(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("top_k_experts"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalizes=True,
        beside=structs.replace(dense),
    )


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json`'s keys; counts may be lists, of an entry for each layer."""
    num_layers = keys.integer("block_count")
    types = gguf_layer_types(keys, num_layers)
    full = [number for number, kind in enumerate(types) if kind == "full_attention"]

    def by_layer(key: str) -> list[Any]:
        value = keys.values.get(key)
        return value if isinstance(value, list) else [value] * num_layers

    heads, sizes = by_layer("attention.head_count_kv"), by_layer("feed_forward_length")
    if not full or len(heads) != num_layers or len(sizes) != num_layers:
        raise keys.fail("attention.head_count_kv", f"an entry for each of {num_layers} layers is expected")
    experts = {
        "enable_moe_block": True,
        "num_experts": keys.values.get("expert_count"),
        "top_k_experts": keys.values.get("expert_used_count"),
        "moe_intermediate_size": keys.values.get("expert_feed_forward_length"),
    }
    return {
        "layer_types": types,
        "head_dim": keys.integer("attention.key_length_swa"),
        "global_head_dim": keys.integer("attention.key_length"),
        "num_key_value_heads": next((heads[at] for at in range(num_layers) if at not in full), heads[0]),
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in keys.tensors,
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", 0, minimum=0),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, minimum=0),
        "rope_parameters": {
            "full_attention": {**so_far["rope_parameters"], "partial_rotary_factor": 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)},
        },
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0, can_be_zero=True) or None,
        **(experts if keys.values.get("expert_count") else {}),
    }


_TEXT = Family(
    name="Gemma4ForCausalLM",
    model_type="gemma4_text",
    model="octavo.models.gemma4:Gemma4ForCausalLM",
    read_layers=_read_layers,
    weight_names={
        **DECODER_NAMES,
        **HEAD_NORM_NAMES,
        **SANDWICH_NORM_NAMES,
        **expert_names(f"{_LAYER}.router.proj", _EXPERT, place="layers.{layer}.experts"),
        f"{_LAYER}.router": "layers.{layer}.experts.scales",
        f"{_LAYER}.post_feedforward_layernorm_1": "layers.{layer}.experts.mlp_norm",
        f"{_LAYER}.pre_feedforward_layernorm_2": "layers.{layer}.experts.norm",
        f"{_LAYER}.post_feedforward_layernorm_2": "layers.{layer}.experts.post_norm",
        _LAYER: "layers.{layer}.scalar",
        f"{_LAYER}.per_layer_input_gate": "layers.{layer}.token_input.gate",
        f"{_LAYER}.per_layer_projection": "layers.{layer}.token_input.projection",
        f"{_LAYER}.post_per_layer_input_norm": "layers.{layer}.token_input.norm",
        "model.embed_tokens_per_layer": "token_inputs.embedding",
        "model.per_layer_model_projection": "token_inputs.projection",
        "model.per_layer_projection_norm": "token_inputs.norm",
    },
    other_spellings=stacked_experts(_EXPERT, stack=f"{_LAYER}.experts"),
    num_kv_heads=4,
    head_dim=256,
    window_rule="pattern",
    window=512,
    head_norms="each",
    rope_theta=1e6,
    local_rope_theta=1e4,
    is_length_scaled=True,
    activation="gelu_tanh",
    norms="around",
    scales_embedding=True,
    has_token_inputs=True,
    gguf=GgufFacts(
        architecture="gemma4",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps": ("experts.{expert}.gate_proj", "experts.{expert}.up_proj"),
            "ffn_down_exps": "experts.{expert}.down_proj",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        settings=_gguf_settings,
    ),
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
)
FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        name="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        is_nested=True,
        left_out=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    ),
)
