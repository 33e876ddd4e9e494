"""Qwen3-Next and Qwen3.5, dense and with experts: gated delta nets (arXiv:2412.06464), full attention in some layers.

Full attention has a gate on its result, and rotates a part of each head. Rotary positions count time, height and width;
those of a text are all the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.config.family import (
    DECODER_NAMES,
    HEAD_NORM_NAMES,
    NEXTN_NAMES,
    Family,
    GgufFacts,
    GgufKeys,
    Layers,
    MoEFacts,
    MtpFacts,
    expert_names,
    stacked_experts,
)
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.layers import GatedDeltaSpec, LayerSpec
from octavo.errors import CheckpointError, UnsupportedModelError

_LINEAR, _FULL = "linear_attention", "full_attention"
_ROTARY_KEYS = ("rope_parameters", "rope_scaling")
_ROWS_BY_KIND = "linear_rows_by_kind"  # of GGUF files of Qwen3-Next, in no `config.json`
_AXES_KEYS = ("mrope_section", "mrope_interleaved")


def _read_hybrid(
    fields: JsonFields, family: Family, max_position_embeddings: int, *, is_by_head: bool = False
) -> Layers:
    """Return the layers, and the table that those with full attention rotate by."""
    layers, rotary = read_layers(_plain_rotary(fields), family, max_position_embeddings)
    linear = _linear_attention(fields, is_by_head)
    hybrid = tuple(
        LayerSpec(linear, layer.feed_forward) if kind == _LINEAR else layer.with_attention(gate="elements_by_query")
        for kind, layer in zip(_kinds(fields, len(layers)), layers, strict=True)
    )
    return hybrid, rotary


def _kinds(fields: JsonFields, num_layers: int) -> list[str]:
    if "layer_types" not in fields:
        interval = fields.integer("full_attention_interval", 4)
        return [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers:
        raise CheckpointError(f"{fields.origin}: layer_types: {num_layers} entries are expected, found {len(kinds)}")
    if unknown := sorted(set(kinds) - {_LINEAR, _FULL}):
        raise UnsupportedModelError(f"{fields.origin}: layer_types: {unknown[0]!r} is not supported")
    if _FULL not in kinds:
        raise UnsupportedModelError(f"{fields.origin}: layer_types: one layer with {_FULL} at least is expected")
    return kinds


def _linear_attention(fields: JsonFields, is_by_head: bool) -> GatedDeltaSpec:
    num_key_heads = fields.integer("linear_num_key_heads", 16)
    num_value_heads = fields.integer("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        raise fields.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({num_key_heads}) is expected")
    conv_size = fields.integer("linear_conv_kernel_dim", 4, minimum=2)
    if conv_size > 9:
        raise fields.unsupported("linear_conv_kernel_dim", "; 2 to 9 are")
    return GatedDeltaSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_size=fields.integer("linear_key_head_dim", 128),
        value_size=fields.integer("linear_value_head_dim", 128),
        conv_size=conv_size,
        has_rows_by_head=is_by_head and not fields.flag(_ROWS_BY_KIND, False),
        has_gates_by_head=is_by_head,
    )


def _plain_rotary(fields: JsonFields) -> JsonFields:
    """Return the fields with one axis of positions; older files call the default kind with three of them mrope."""
    values: dict[str, Any] = {**dict.fromkeys(fields.nulls), **fields.values}
    for key in _ROTARY_KEYS:
        if key not in fields:
            continue
        rotary = dict(fields.nested(key).values)
        if "mrope" in (rotary.get("type"), rotary.get("rope_type")):
            rotary = {**rotary, "rope_type": "default"}
            rotary.pop("type", None)
        values[key] = rotary
    return without_keys(JsonFields(fields.origin, values), "layer_types", *_AXES_KEYS)


_MLP, _PLACE = "model.layers.{layer}.mlp", "layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"
_LINEAR_ATTENTION, _MIXER = "model.layers.{layer}.linear_attn", "layers.{layer}.attention"
_NAMES = {
    **DECODER_NAMES,
    **HEAD_NORM_NAMES,
    _LINEAR_ATTENTION: f"{_MIXER}.recurrence",  # numbers without names of their own
    f"{_LINEAR_ATTENTION}.conv1d": f"{_MIXER}.recurrence:conv",
    f"{_LINEAR_ATTENTION}.norm": f"{_MIXER}.recurrence:norm",
    f"{_LINEAR_ATTENTION}.out_proj": f"{_MIXER}.output",
}
_ROWS = {f"{_LINEAR_ATTENTION}.in_proj_{part}": f"{_MIXER}.rows:{part}" for part in ("qkv", "z")}
_KIND_BY_KIND = {
    **_ROWS,
    **{f"{_LINEAR_ATTENTION}.in_proj_{part}": f"{_MIXER}.gates:{part}" for part in ("b", "a")},
}
_HEAD_BY_HEAD = {
    **_ROWS,  # of GGUF files
    f"{_LINEAR_ATTENTION}.in_proj_qkvz": f"{_MIXER}.rows:qkvz",
    f"{_LINEAR_ATTENTION}.in_proj_ba": f"{_MIXER}.gates:ba",
}
_EXPERT_NAMES = {
    **expert_names(f"{_MLP}.gate", _EXPERT),
    f"{_MLP}.shared_expert_gate": f"{_PLACE}.router:shared",
    f"{_MLP}.shared_expert.gate_proj": f"{_PLACE}.shared_expert.gate_up:gate",
    f"{_MLP}.shared_expert.up_proj": f"{_PLACE}.shared_expert.gate_up:up",
    f"{_MLP}.shared_expert.down_proj": f"{_PLACE}.shared_expert.down",
}


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = keys.integer("block_count") - keys.integer("nextn_predict_layers", 0, minimum=0)
    num_value_heads = keys.integer("ssm.time_step_rank")
    head_dim, has_states = so_far["head_dim"], "blk.{}.ssm_out.weight"
    return {
        "num_hidden_layers": num_layers,
        "layer_types": [_LINEAR if has_states.format(layer) in keys.tensors else _FULL for layer in range(num_layers)],
        "partial_rotary_factor": keys.integer("rope.dimension_count", head_dim) / head_dim,
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": keys.integer("ssm.inner_size") // num_value_heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
    }


_MTP = MtpFacts(
    layer="mtp.layers.{number}",
    names={
        "mtp.fc": "projection",
        "mtp.pre_fc_norm_embedding": "embedding_norm",
        "mtp.pre_fc_norm_hidden": "hidden_norm",
        "mtp.norm": "norm",
        "mtp.embed_tokens": "embedding",
        "mtp.lm_head": "logits_head",
    },
)
_GGUF = GgufFacts(
    architecture="qwen35",
    names={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_a.": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        **NEXTN_NAMES,
    },
    settings=_gguf_settings,
)
_GGUF_NEXT = replace(
    _GGUF,
    architecture="qwen3next",
    names={**_GGUF.names, "ssm_ba": "linear_attn.in_proj_ba"},
    settings=lambda keys, so_far: {**_gguf_settings(keys, so_far), _ROWS_BY_KIND: True},
    is_converted=False,
)
_PARTIAL = {"partial_rotary_factor": 0.25}
_SIZES = {"vocab_size": 248320, "num_attention_heads": 16, "max_position_embeddings": 32768, **_PARTIAL}
_DENSE = Family(
    name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    read_layers=_read_hybrid,
    weight_names={**_NAMES, **_KIND_BY_KIND},
    num_kv_heads=4,
    head_dim=256,
    head_norms="each",
    has_partial_rotary=True,
    norm_offset=1.0,
    left_out=("mtp.", "model.mtp."),
    mtp=_MTP,
    defaults={**_SIZES, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32},
    gguf=_GGUF,
)
_MIXTURE = replace(
    _DENSE,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    weight_names={**_NAMES, **_KIND_BY_KIND, **_EXPERT_NAMES},
    other_spellings=stacked_experts(_EXPERT),
    num_kv_heads=2,
    # Of layers without experts, of which there are none, the size is any.
    defaults={**_SIZES, "hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 40},
    moe=MoEFacts(
        num_experts=256,
        top_k=8,
        intermediate_size=512,
        shared_intermediate_size=512,
        always_renormalizes=True,
        has_dense_layers=False,
    ),
    gguf=replace(_GGUF, architecture="qwen35moe"),
)
# With a vision tower, which is left out: only the language model is served.
_AS_LANGUAGE_MODEL: dict[str, Any] = {
    "is_nested": True,
    "gguf": None,
    "left_out": (*_DENSE.left_out, "model.visual.", "visual."),
}
FAMILIES = (
    _DENSE,
    _MIXTURE,
    replace(_DENSE, name="Qwen3_5ForConditionalGeneration", model_type="qwen3_5", **_AS_LANGUAGE_MODEL),
    replace(_MIXTURE, name="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe", **_AS_LANGUAGE_MODEL),
    replace(
        _DENSE,
        name="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        read_layers=partial(_read_hybrid, is_by_head=True),
        weight_names={**_NAMES, **_HEAD_BY_HEAD, **_EXPERT_NAMES},
        other_spellings=stacked_experts(_EXPERT),
        num_kv_heads=2,
        gguf=_GGUF_NEXT,
        defaults={"norm_topk_prob": True, **_PARTIAL},
        moe=MoEFacts(num_experts=512, top_k=10, intermediate_size=512, shared_intermediate_size=512),
    ),
)
