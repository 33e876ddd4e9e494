"""LFM2 (Liquid AI 2025, arXiv:2511.23404), dense and with experts: short convolutions, attention in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.family import Family, GgufFacts, GgufKeys, Layers, expert_names, stacked_experts
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.layers import ExpertsSpec, RoutingSpec, ShortConvSpec
from octavo.errors import CheckpointError, UnsupportedModelError

_CONV, _FULL = "conv", "full_attention"
_EPSILON = 1e-6  # in transformers' sum of the chosen scores


def _read_dense(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    return _read_layers(fields.with_key("intermediate_size", _adjusted_size(fields)), family, max_position_embeddings)


def _read_mixture(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = _read_layers(without_keys(fields, "num_experts"), family, max_position_embeddings)
    num_dense, experts = fields.integer("num_dense_layers", 2, minimum=0), _experts(fields)
    mixed = tuple(layer if at < num_dense else replace(layer, feed_forward=experts) for at, layer in enumerate(layers))
    return mixed, rotary


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(without_keys(fields, "layer_types"), family, max_position_embeddings)
    conv = read_short_conv(fields, default_size=3)
    kinds = _kinds(fields, len(layers))
    mixed = (replace(layer, mixer=conv) if kind == _CONV else layer for kind, layer in zip(kinds, layers, strict=True))
    return tuple(mixed), rotary


def read_short_conv(fields: JsonFields, default_size: int) -> ShortConvSpec:
    conv_size = fields.integer("conv_L_cache", default_size, minimum=2)
    if conv_size > 9:
        raise fields.unsupported("conv_L_cache", "; 2 to 9 are")
    channels, has_bias = fields.integer("hidden_size"), fields.flag("conv_bias", False)
    return ShortConvSpec(num_channels=channels, conv_size=conv_size, has_bias=has_bias)


def _kinds(fields: JsonFields, num_layers: int) -> list[str]:
    if "layer_types" not in fields:
        full = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields else list(range(num_layers))
        if full and max(full) >= num_layers:
            raise fields.fail(
                "full_attn_idxs", f"numbers of layers below num_hidden_layers ({num_layers}) are expected"
            )
        kinds = [_FULL if layer in full else _CONV for layer in range(num_layers)]
    else:
        kinds = fields.texts("layer_types")
    if len(kinds) != num_layers:
        raise CheckpointError(f"{fields.origin}: layer_types: {num_layers} entries are expected, found {len(kinds)}")
    if unknown := sorted(set(kinds) - {_CONV, _FULL}):
        raise UnsupportedModelError(f"{fields.origin}: layer_types: {unknown[0]!r} is not supported")
    if _FULL not in kinds:
        raise UnsupportedModelError(f"{fields.origin}: layer_types: one layer with {_FULL} at least is expected")
    return kinds


def _adjusted_size(fields: JsonFields) -> int:
    """Return the size of MLPs: two thirds of what is stated, times a factor, in whole multiples."""
    stated = fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return stated
    size = int(2 * stated / 3)
    if "block_ffn_dim_multiplier" in fields.nulls:
        return size
    unit = fields.integer("block_multiple_of", 256)
    return -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * size) // unit) * unit


def _experts(fields: JsonFields) -> ExpertsSpec:
    num_experts, top_k = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most as many as there are experts ({num_experts})")
    renormalizes = fields.flag("norm_topk_prob", True)
    routing = RoutingSpec(
        scores="sigmoid",
        has_correction=fields.flag("use_expert_bias", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        epsilon=_EPSILON if renormalizes else 0.0,
    )
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalizes=renormalizes,
        routing=routing,
    )


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    heads = keys.values.get("attention.head_count_kv")
    num_layers = keys.integer("block_count")
    if not isinstance(heads, list) or len(heads) != num_layers:
        raise keys.fail("attention.head_count_kv", f"an entry for each of {num_layers} layers is expected")
    width = keys.tensors.get("blk.0.ffn_gate.weight")  # there are files that state another size
    return {
        "layer_types": [_FULL if count else _CONV for count in heads],
        "num_key_value_heads": next((count for count in heads if count), None),
        "intermediate_size": so_far["intermediate_size"] if width is None else width[0],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in keys.tensors),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0, minimum=0),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in keys.tensors),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


_LAYER, _PLACE = "model.layers.{layer}", "layers.{layer}"
_MLP = f"{_LAYER}.feed_forward"
_EXPERT = _MLP + ".experts.{expert}"
NAMES = {
    "model.embed_tokens": "embedding",
    f"{_LAYER}.operator_norm": f"{_PLACE}.attention_norm",
    f"{_LAYER}.self_attn.q_proj": f"{_PLACE}.attention.qkv:q",
    f"{_LAYER}.self_attn.k_proj": f"{_PLACE}.attention.qkv:k",
    f"{_LAYER}.self_attn.v_proj": f"{_PLACE}.attention.qkv:v",
    f"{_LAYER}.self_attn.out_proj": f"{_PLACE}.attention.out",
    f"{_LAYER}.self_attn.q_layernorm": f"{_PLACE}.attention.head_norms:query",
    f"{_LAYER}.self_attn.k_layernorm": f"{_PLACE}.attention.head_norms:key",
    f"{_LAYER}.conv.in_proj": f"{_PLACE}.attention.rows",
    f"{_LAYER}.conv.conv": f"{_PLACE}.attention.conv:conv",
    f"{_LAYER}.conv.out_proj": f"{_PLACE}.attention.output",
    f"{_LAYER}.ffn_norm": f"{_PLACE}.mlp_norm",
    f"{_MLP}.w1": f"{_PLACE}.mlp.gate_up:gate",
    f"{_MLP}.w3": f"{_PLACE}.mlp.gate_up:up",
    f"{_MLP}.w2": f"{_PLACE}.mlp.down",
    "model.embedding_norm": "norm",  # behind the layers, whatever it is called
    "lm_head": "logits_head",
}
_GGUF = GgufFacts(
    architecture="lfm2",
    names={
        "output_norm": "model.embedding_norm",
        "token_embd_norm": "model.embedding_norm",  # in older files
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.gate.e_score_correction_bias",
        "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
        "ffn_up_exps": "feed_forward.experts.{expert}.w3",
        "ffn_down_exps": "feed_forward.experts.{expert}.w2",
    },
    settings=_gguf_settings,
)
_SIZES = {"vocab_size": 65536, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 128000}
_DENSE = Family(
    name="Lfm2ForCausalLM",
    model_type="lfm2",
    read_layers=_read_dense,
    weight_names=NAMES,
    usual_keys={
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    },
    num_kv_heads=8,
    head_norms="each",
    qkv_bias=False,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    defaults={**_SIZES, "hidden_size": 2560, "intermediate_size": 12288, "tie_word_embeddings": True},
    gguf=_GGUF,
)
FAMILIES = (
    _DENSE,
    replace(
        _DENSE,
        name="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        read_layers=_read_mixture,
        weight_names={**NAMES, **expert_names(f"{_MLP}.gate", _EXPERT, "w1", "w3", "w2")},
        other_spellings={
            **stacked_experts(_EXPERT, "w1", "w3", "w2", stack=f"{_MLP}.experts"),
            f"{_MLP}.expert_bias": (f"{_MLP}.gate.e_score_correction_bias",),
        },
        usual_keys={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
        defaults={
            **_SIZES,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
        },
        gguf=replace(_GGUF, architecture="lfm2moe"),
    ),
)
