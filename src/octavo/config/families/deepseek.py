"""Latent attention: DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), Kimi K2, which is V3, GLM-4.7-Flash.

The keys and defaults are those of transformers, with what it ignores of them.
"""

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from octavo.config.family import (
    DECODER_NAMES,
    MTP_BEHIND,
    NEXTN_NAMES,
    Family,
    GgufFacts,
    Layers,
    MtpFacts,
    expert_names,
    stacked_experts,
)
from octavo.config.hf_layers import read_rope
from octavo.config.json_fields import JsonFields
from octavo.config.layers import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForward,
    LatentSpec,
    LayerSpec,
    RopeConfig,
    RotarySpec,
    RoutingSpec,
)
from octavo.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

_DEEPSEEK_V2: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    }
)
_DEEPSEEK_V3: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
)
_GLM4_MOE_LITE: Mapping[str, Any] = MappingProxyType(
    {
        **_DEEPSEEK_V3,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
    }
)
# The name of how experts are chosen, with the scores that go with it, and how many of a group's experts rate it.
_METHODS = MappingProxyType(
    {"greedy": ("softmax", 1), "group_limited_greedy": ("softmax", 1), "noaux_tc": ("sigmoid", 2)}
)
_EPSILON = 1e-20  # in transformers' sum of the chosen scores


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    rotary_size = fields.integer("qk_rope_head_dim")
    if rotary_size % 2:
        raise fields.unsupported("qk_rope_head_dim", ": rotary embedding needs an even number")
    rope = read_rope(fields, family, rotary_size, max_position_embeddings)
    latent = LatentSpec(
        rank=fields.integer("kv_lora_rank"),
        rotary_size=rotary_size,
        key_size=fields.integer("qk_nope_head_dim"),
        value_size=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank") if "q_lora_rank" in fields else None,
    )
    has_bias = fields.flag("attention_bias", False)
    attention = AttentionSpec(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.size,
        rotates_pairs=fields.flag("rope_interleave", True),
        scale=_scale(rope, latent),
        has_bias=has_bias,
        has_out_bias=has_bias,
        latent=latent,
    )
    layers = tuple(LayerSpec(attention, after) for after in read_feed_forwards(fields))
    return layers, (RotarySpec(rope=rope, width=rotary_size),)


def _scale(rope: RopeConfig, latent: LatentSpec) -> float:
    """Return the factor on scores: of the whole head's size, and of what YaRN's temperature asks for at all sizes."""
    temperature = 1.0
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1.0:
        temperature = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return float((latent.key_size + latent.rotary_size) ** -0.5 * temperature**2)


def read_feed_forwards(fields: JsonFields) -> list[FeedForward]:
    """Return what follows the attention of each layer: at first MLPs, then experts."""
    num_layers = fields.integer("num_hidden_layers")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.unsupported("moe_layer_freq", "; only 1 is")
    dense = DenseSpec(intermediate_size=fields.integer("intermediate_size"), has_bias=fields.flag("mlp_bias", False))
    if "mlp_layer_types" not in fields:
        num_dense = min(num_layers, fields.integer("first_k_dense_replace", minimum=0))
        kinds = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    else:
        kinds = fields.texts("mlp_layer_types")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{fields.origin}: mlp_layer_types: {num_layers} entries are expected, found {len(kinds)}"
        )
    if unknown := sorted(set(kinds) - {"dense", "sparse"}):
        raise UnsupportedModelError(f"{fields.origin}: mlp_layer_types: {unknown[0]!r} is not supported")
    experts = _experts(fields) if "sparse" in kinds else dense
    return [experts if kind == "sparse" else dense for kind in kinds]


def _experts(fields: JsonFields) -> ExpertsSpec:
    if fields.flag("mlp_bias", False):
        raise fields.unsupported("mlp_bias", " where layers have experts")
    num_experts, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    inner, num_shared = fields.integer("moe_intermediate_size"), fields.integer("n_shared_experts", 0, minimum=0)
    routing = _routing(fields, num_experts)
    if top_k > (limit := num_experts // routing.num_groups * routing.top_groups):
        raise fields.fail("num_experts_per_tok", f"at most as many as there are experts in the chosen groups ({limit})")
    is_sigmoid, renormalizes = routing.scores == "sigmoid", fields.flag("norm_topk_prob")
    if renormalizes and not is_sigmoid:
        logger.warning("%s: norm_topk_prob has no effect in this architecture", fields.origin)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_intermediate_size=num_shared * inner or None,
        renormalizes=renormalizes and is_sigmoid,
        routing=routing,
    )


def _routing(fields: JsonFields, num_experts: int) -> RoutingSpec:
    method = fields.text("topk_method")
    if method not in _METHODS:
        raise fields.unsupported("topk_method", f"; known: {', '.join(_METHODS)}")
    scores, group_best = _METHODS[method]
    if fields.text("scoring_func") != scores:
        raise fields.unsupported("scoring_func", f" with topk_method={method!r}")
    is_grouped = method != "greedy"
    num_groups = fields.integer("n_group", 1) if is_grouped else 1
    top_groups = fields.integer("topk_group", 1) if is_grouped else 1
    if num_experts % num_groups:
        raise fields.fail("n_group", f"a divisor of n_routed_experts ({num_experts}) is expected")
    if top_groups > num_groups:
        raise fields.fail("topk_group", f"at most n_group ({num_groups}) is expected")
    if num_groups > 1 and num_experts // num_groups < group_best:
        raise fields.fail("n_group", f"groups of at least {group_best} experts are expected")
    is_sigmoid = scores == "sigmoid"
    return RoutingSpec(
        scores="sigmoid" if is_sigmoid else "softmax",
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=2 if group_best == 2 and num_groups > 1 else 1,
        has_correction=is_sigmoid,
        scale=fields.number("routed_scaling_factor"),
        epsilon=_EPSILON if is_sigmoid else 0.0,
        gates_shared=False,
    )


_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
_EXPERT = _MLP + ".experts.{expert}"
_NAMES = {
    **{name: place for name, place in DECODER_NAMES.items() if ".self_attn." not in name},
    f"{_ATTENTION}.q_proj": "layers.{layer}.attention.query",
    f"{_ATTENTION}.q_a_proj": "layers.{layer}.attention.query_down",
    f"{_ATTENTION}.q_a_layernorm": "layers.{layer}.attention.query_norm",
    f"{_ATTENTION}.q_b_proj": "layers.{layer}.attention.query_up",
    f"{_ATTENTION}.kv_a_proj_with_mqa": "layers.{layer}.attention.latent",
    f"{_ATTENTION}.kv_a_layernorm": "layers.{layer}.attention.latent_norm",
    f"{_ATTENTION}.kv_b_proj": "layers.{layer}.attention.heads",
    f"{_ATTENTION}.o_proj": "layers.{layer}.attention.out",
    **expert_names(f"{_MLP}.gate", _EXPERT),
    f"{_MLP}.shared_experts.gate_proj": "layers.{layer}.mlp.shared_expert.gate_up:gate",
    f"{_MLP}.shared_experts.up_proj": "layers.{layer}.mlp.shared_expert.gate_up:up",
    f"{_MLP}.shared_experts.down_proj": "layers.{layer}.mlp.shared_expert.down",
}


# Of corrections, shared experts, and layers that predict further tokens, in GGUF files.
GGUF_FURTHER_NAMES = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}
# Parts of a block in GGUF files. In newer ones keys and values of heads are apart: `loader/gguf.py` joins them.
_GGUF_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **GGUF_FURTHER_NAMES,
    **NEXTN_NAMES,
}
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_GLM_LAYERS, _GLM_VOCAB_SIZE = (47, 48), 154880  # of GLM-4.7-Flash, whose files do not say it


def _gguf_is_sigmoid(keys: JsonFields) -> bool:
    is_glm = keys.values.get("block_count") in _GLM_LAYERS and keys.values.get("vocab_size") == _GLM_VOCAB_SIZE
    function = keys.integer("expert_gating_func", _SIGMOID if is_glm else _SOFTMAX, minimum=0)
    return (function or _SOFTMAX) == _SIGMOID


def _gguf_settings(keys: JsonFields, so_far: Mapping[str, Any]) -> dict[str, Any]:
    """Translate; sizes of heads are under keys of their own (*_mla) where the usual ones say what is cached."""
    suffix = "_mla" if "attention.key_length_mla" in keys else ""
    rotary_size = keys.integer("rope.dimension_count")
    is_sigmoid, num_groups = _gguf_is_sigmoid(keys), keys.integer("expert_group_count", 1)
    rope = {key: value for key, value in so_far["rope_parameters"].items() if key != "attention_factor"}
    if log_multiplier := keys.number("rope.scaling.yarn_log_multiplier", 0.0, can_be_zero=True):
        temperature = round(log_multiplier * 10.0, 6)  # stored as float32, and a tenth
        rope |= {"mscale": temperature, "mscale_all_dim": temperature}
    method = "noaux_tc" if is_sigmoid else "group_limited_greedy" if num_groups > 1 else "greedy"
    return {
        "num_hidden_layers": keys.integer("block_count") - keys.integer("nextn_predict_layers", 0, minimum=0),
        "head_dim": rotary_size,
        "rope_parameters": rope,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.values.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotary_size,
        "qk_nope_head_dim": keys.integer(f"attention.key_length{suffix}") - rotary_size,
        "v_head_dim": keys.integer(f"attention.value_length{suffix}"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0, can_be_zero=True) or 1.0,
        "norm_topk_prob": is_sigmoid and keys.flag("expert_weights_norm", False),
        "n_group": num_groups,
        "topk_group": keys.integer("expert_group_used_count", 1),
        "topk_method": method,
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
    }


def _gguf(*, is_sigmoid: bool) -> GgufFacts:
    return GgufFacts(
        architecture="deepseek2",
        fits=lambda keys: _gguf_is_sigmoid(keys) == is_sigmoid,
        names=_GGUF_NAMES,
        settings=_gguf_settings,
        own_keys=frozenset({"attention.value_length", "rope.dimension_count", "rope.scaling.yarn_log_multiplier"}),
    )


def _family(
    name: str, model_type: str, defaults: Mapping[str, Any], rms_norm_eps: float = 1e-6, gguf: GgufFacts | None = None
) -> Family:
    return Family(
        name=name,
        model_type=model_type,
        read_layers=_read_layers,
        weight_names=_NAMES,
        other_spellings=stacked_experts(_EXPERT),
        gguf=gguf,
        mtp=MtpFacts(**MTP_BEHIND),
        defaults=defaults,
        rms_norm_eps=rms_norm_eps,
    )


FAMILIES = (
    _family("DeepseekV2ForCausalLM", "deepseek_v2", _DEEPSEEK_V2, gguf=_gguf(is_sigmoid=False)),
    _family("DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK_V3, gguf=_gguf(is_sigmoid=True)),
    _family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", _GLM4_MOE_LITE, rms_norm_eps=1e-5),
)
