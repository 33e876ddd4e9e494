"""Reads what layers are from `config.json`: heads, biases, sliding windows, mixtures of experts, rotary embedding.

Rotary settings are in the formats of transformers 4 and 5. Version 4 writes `rope_theta` and `rope_scaling: {type |
rope_type, ...}` or null; version 5 writes one object `rope_parameters: {rope_theta, rope_type, ...}`.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast, get_args

from msgspec import structs

from octavo.config.family import Family, Layers, MoEFacts
from octavo.config.hf_quantization import GGUF_TYPES
from octavo.config.json_fields import JsonFields
from octavo.config.layers import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForward,
    LayerSpec,
    RopeConfig,
    RopeKind,
    RotarySpec,
)
from octavo.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

_RULES_OF_DEFAULTS = frozenset({"pattern", "upper_layers", "even_lower_layers"})  # layer_types may say otherwise
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")  # transformers 5 renames the first to the second
# The keys of the five types, and keys without effect that occur in real files.
_KNOWN_KEYS = frozenset(
    {
        *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
        *("low_freq_factor", "high_freq_factor"),
        *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"),
        *("attn_factor", "extrapolation_factor", "apply_yarn_scaling"),
    }
)
_CAP, _PARTIAL = "attn_logit_softcapping", "partial_rotary_factor"
_YARN_NEUTRAL = MappingProxyType({"extrapolation_factor": 1.0, "apply_yarn_scaling": True})


def read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    """Return the layers, and the tables that they rotate by."""
    num_heads, num_kv_heads, head_dim = _heads(fields, family)
    width = _rotary_width(fields, family, head_dim)
    rotary = [RotarySpec(rope=read_rope(fields, family, width, max_position_embeddings), width=width)]
    if (local := _local_rope(fields, family.local_rope_theta)) is not None:
        rotary.append(RotarySpec(rope=local, width=head_dim))
    has_bias, has_out_bias = _biases(fields, family)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=_attention_scale(fields, family),
        soft_cap=fields.number(_CAP) if family.has_score_cap_key and _CAP in fields else None,
        has_bias=has_bias,
        has_out_bias=has_out_bias,
        head_norms=family.head_norms,
        rotates_pairs=family.rotates_pairs,
    )
    windowed = structs.replace(attention, rotary=len(rotary) - 1)
    layers = tuple(
        LayerSpec(attention if window is None else structs.replace(windowed, sliding_window=window), after)
        for window, after in zip(_sliding_windows(fields, family), _feed_forwards(fields, family), strict=True)
    )
    return layers, tuple(rotary)


def _heads(fields: JsonFields, family: Family) -> tuple[int, int, int]:
    """Return the numbers of query and KV heads, and the head size."""
    num_heads = fields.integer("num_attention_heads")
    absent = num_heads if "num_key_value_heads" in fields.nulls else family.num_kv_heads or num_heads
    num_kv_heads = fields.integer("num_key_value_heads", absent)
    if num_heads % num_kv_heads:
        raise fields.fail("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads}) is expected")
    hidden_size = fields.integer("hidden_size")
    if "head_dim" not in fields and family.head_dim is None and hidden_size % num_heads:
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}) is expected, or head_dim")
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"{fields.origin}: head_dim={head_dim}: rotary embedding needs an even number")
    return num_heads, num_kv_heads, head_dim


def _rotary_width(fields: JsonFields, family: Family, head_dim: int) -> int:
    """Return how many elements at the front of a head are rotated."""
    if not family.has_partial_rotary:
        return head_dim
    source = next((each for each in (_merged(fields), fields) if _PARTIAL in each), fields)
    width = int(head_dim * source.number(_PARTIAL, 1.0))
    if not 0 < width <= head_dim or width % 2:
        raise source.unsupported(_PARTIAL, f": an even number of a head's {head_dim} elements is expected")
    return width


def without_keys(fields: JsonFields, *names: str) -> JsonFields:
    """Return the fields without these keys, also in the rotary settings."""

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in names}

    values: dict[str, Any] = kept({**dict.fromkeys(fields.nulls), **fields.values})
    for key in ("rope_parameters", "rope_scaling"):
        if key in fields:
            values[key] = kept(fields.nested(key).values)
    return JsonFields(fields.origin, values)


def _biases(fields: JsonFields, family: Family) -> tuple[bool, bool]:
    """Return whether q, k and v have biases, and whether the output projection has one."""
    if family.has_qkv_bias_key:
        return fields.flag("qkv_bias", True), False
    if family.qkv_bias is not None:
        return family.qkv_bias, False
    has_bias = fields.flag("attention_bias", False)
    if family.out_bias_key:
        return has_bias, fields.flag(family.out_bias_key, False)
    return has_bias, has_bias and family.has_out_bias


def _attention_scale(fields: JsonFields, family: Family) -> float | None:
    """Return the factor on products of queries and keys; None: the usual one."""
    if not family.has_attention_scale_key:
        return None
    for key in (_CAP, "use_bidirectional_attention"):
        if fields.values.get(key) and not (key == _CAP and family.has_score_cap_key):
            raise fields.unsupported(key)
    return float(fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


def _sliding_windows(fields: JsonFields, family: Family) -> tuple[int | None, ...]:
    """Return each layer's window in tokens; None for full attention."""
    num_layers = fields.integer("num_hidden_layers")
    if family.window_rule == "none" and "sliding_window" in fields:
        logger.warning("%s: sliding_window has no effect in this architecture", fields.origin)
    window = _window(fields, family)
    by_rule = tuple(window if _has_window(layer, fields, family) else None for layer in range(num_layers))
    if "layer_types" not in fields:
        return by_rule
    by_type = _windows_of_types(fields, window, num_layers)
    if family.window_rule not in _RULES_OF_DEFAULTS and by_type != by_rule:
        raise UnsupportedModelError(f"{fields.origin}: layer_types: in this architecture all layers are of one type")
    return by_type


def _window(fields: JsonFields, family: Family) -> int | None:
    """Return the window of layers that have one. An absent key means the default, null means no window."""
    if family.window_rule == "none" or "sliding_window" in fields.nulls:
        return None
    if family.window_rule not in {"all_layers", "pattern"} and not fields.flag("use_sliding_window", False):
        return None
    if "sliding_window" not in fields and family.window is None:
        return None
    return fields.integer("sliding_window", family.window)


def _has_window(layer: int, fields: JsonFields, family: Family) -> bool:
    if family.window_rule == "pattern":
        return (layer + 1) % fields.integer("sliding_window_pattern", 6) != 0
    if family.window_rule not in _RULES_OF_DEFAULTS:
        return True
    border = fields.integer("max_window_layers", 28, minimum=0)
    return layer >= border if family.window_rule == "upper_layers" else layer < border and layer % 2 == 0


def _windows_of_types(fields: JsonFields, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    types = fields.texts("layer_types")
    if len(types) != num_layers:
        raise CheckpointError(f"{fields.origin}: layer_types: {num_layers} entries are expected, found {len(types)}")
    for kind in types:
        if kind not in {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(f"{fields.origin}: layer_types: {kind!r} is not supported")
    if window is None and "sliding_attention" in types:
        raise UnsupportedModelError(
            f"{fields.origin}: layer_types: sliding_attention is listed, but there is no window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _feed_forwards(fields: JsonFields, family: Family) -> list[FeedForward]:
    """Return what follows the attention of each layer."""
    num_layers = fields.integer("num_hidden_layers")
    dense = DenseSpec(
        intermediate_size=fields.integer("intermediate_size"),
        has_bias=family.has_mlp_bias_key and fields.flag("mlp_bias", False),
    )
    if family.moe is None:
        _refuse_if_set(fields, _NUM_EXPERTS_KEYS)
        return [dense] * num_layers
    experts = _experts(fields, family.moe)
    return [experts if is_sparse else dense for is_sparse in _sparse_layers(fields, family.moe)]


def _experts(fields: JsonFields, moe: MoEFacts) -> ExpertsSpec:
    """Read how tokens are routed."""
    stated = [key for key in _NUM_EXPERTS_KEYS if key in fields]
    numbers = [fields.integer(key) for key in stated]
    if len(set(numbers)) > 1:
        raise fields.fail(stated[0], f"{stated[1]} is {numbers[1]}")
    num_experts = numbers[0] if numbers else moe.num_experts
    top_k = fields.integer("num_experts_per_tok", moe.top_k)
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most as many as there are experts ({num_experts})")
    own_key = "intermediate_size" if moe.intermediate_size is None else "moe_intermediate_size"
    shared_size = None
    if moe.shared_intermediate_size is None:
        _refuse_if_set(fields, ("shared_expert_intermediate_size", "n_shared_experts"))
    else:
        shared_size = fields.integer("shared_expert_intermediate_size", moe.shared_intermediate_size)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer(own_key, moe.intermediate_size),
        shared_intermediate_size=shared_size,
        renormalizes=moe.always_renormalizes or fields.flag("norm_topk_prob", False),
    )


def _sparse_layers(fields: JsonFields, moe: MoEFacts) -> tuple[bool, ...]:
    """Return whether each layer has experts: every decoder_sparse_step-th, except mlp_only_layers."""
    num_layers = fields.integer("num_hidden_layers")
    if not moe.has_dense_layers:
        return (True,) * num_layers
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    if dense and max(dense) >= num_layers:
        raise fields.fail("mlp_only_layers", f"numbers of layers below num_hidden_layers ({num_layers}) are expected")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def _refuse_if_set(fields: JsonFields, keys: tuple[str, ...]) -> None:
    for key in keys:
        if fields.values.get(key):
            raise fields.unsupported(key, " in this architecture")


def read_rope(config: JsonFields, family: Family, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """Read the rotary embedding settings. Positions with three axes divide the frequencies of a head among them."""
    if family.has_partial_rotary:
        config = without_keys(config, _PARTIAL)
    fields = _merged(config)
    if not family.has_rotary_axes:
        return _one_axis(config, fields, max_position_embeddings, family.rope_theta)
    plain = {key: value for key, value in fields.values.items() if key not in ("mrope_section", "mrope_interleaved")}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":  # the name that older files give to three axes of the default kind
            plain[key] = "default"
    rope = _one_axis(config, JsonFields(fields.origin, plain), max_position_embeddings, family.rope_theta)
    sections = tuple(fields.integers("mrope_section")) or family.rotary_sections
    if len(sections) != 3 or sum(sections) != head_dim // 2:
        raise fields.fail("mrope_section", f"three numbers are expected that add up to {head_dim // 2}")
    return replace(rope, sections=sections, is_interleaved=fields.flag("mrope_interleaved", family.interleaves_axes))


def _local_rope(config: JsonFields, default_theta: float | None) -> RopeConfig | None:
    """Read the rotary settings of layers with a window, where they have their own; None: they do not.

    Version 4 writes `rope_local_base_freq`, version 5 `rope_parameters: {sliding_attention, full_attention}`.
    """
    if default_theta is None:
        return None
    by_kind = config.nested("rope_parameters")
    if unknown := sorted(by_kind.values.keys() - {"full_attention", "sliding_attention"}):
        raise by_kind.unsupported(unknown[0], ": settings under full_attention and sliding_attention are expected")
    fields = by_kind.nested("sliding_attention")
    if (kind := _kind(fields)) != "default":
        raise UnsupportedModelError(f"{fields.origin}: rope_type={kind!r} is not supported for layers with a window")
    _refuse_unknown(config, fields)
    return RopeConfig(theta=fields.number("rope_theta", config.number("rope_local_base_freq", default_theta)))


def _one_axis(config: JsonFields, fields: JsonFields, max_position_embeddings: int, default_theta: float) -> RopeConfig:
    kind = _kind(fields)
    _refuse_unknown(config, fields)
    theta = fields.number("rope_theta", config.number("rope_theta", default_theta))
    if kind == "default":
        return RopeConfig(theta=theta, divisors=tuple(fields.values.get("divisors", ())))
    original = _original_max_position(config, fields, kind, max_position_embeddings)
    if kind == "yarn":
        if theta == 1.0:
            raise fields.fail("rope_theta", "yarn divides by its logarithm, so it cannot be 1")
        factor = fields.number("factor", max_position_embeddings / original)
        own = _yarn(fields, factor)
    else:
        factor, own = fields.number("factor"), {}
    if kind == "llama3":
        own = {key: fields.number(key) for key in ("low_freq_factor", "high_freq_factor")}
        if own["low_freq_factor"] >= own["high_freq_factor"]:
            limit = f"less than high_freq_factor ({own['high_freq_factor']:g}) is expected"
            raise fields.fail("low_freq_factor", limit)
    return RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=original, **own)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return YaRN's temperature (section 3.3), by which queries and keys are multiplied where a model does not say it.

    The mscale pair is DeepSeek's variant.
    """

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if mscale is not None and mscale_all_dim is not None:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def max_supported_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Return the maximum context length that the checkpoint supports, in tokens.

    The length in a llama3 checkpoint is already the scaled one. Beyond the original length, frequencies of the dynamic
    kind would depend on the longest request of the batch.
    """
    if rope.kind not in {"linear", "yarn", "dynamic"}:
        return max_position_embeddings
    assert rope.original_max_position is not None
    return rope.original_max_position if rope.kind == "dynamic" else int(rope.original_max_position * rope.factor)


def _merged(config: JsonFields) -> JsonFields:
    """Merge `rope_scaling` and `rope_parameters`; keys in both must agree. By kind of layer: the full ones."""
    old, new = config.nested("rope_scaling"), config.nested("rope_parameters")
    if "full_attention" in new or "sliding_attention" in new:
        new = new.nested("full_attention")
    for key in old.values.keys() & new.values.keys():
        if old.values[key] != new.values[key]:
            raise old.fail(key, f"rope_parameters has {new.values[key]!r}")
    return JsonFields(new.origin if new.values else old.origin, {**new.values, **old.values})


def _kind(fields: JsonFields) -> RopeKind:
    name = fields.text("rope_type", fields.text("type", "default"))
    if name not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        raise UnsupportedModelError(f"{fields.origin}: rope_type={name!r} is not supported; known: {known}")
    return cast(RopeKind, name)


def _refuse_unknown(config: JsonFields, fields: JsonFields) -> None:
    known = _KNOWN_KEYS | ({"divisors"} if GGUF_TYPES in config else frozenset())  # which only such files have
    for key in sorted(fields.values.keys() - known):
        raise fields.unsupported(key)
    for source in (config, fields):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.unsupported("partial_rotary_factor", "; only 1.0 is")


def _original_max_position(config: JsonFields, fields: JsonFields, kind: RopeKind, max_position_embeddings: int) -> int:
    if kind == "linear":
        return max_position_embeddings
    stated = fields.integer("original_max_position_embeddings", max_position_embeddings)
    if kind == "dynamic":
        return min(stated, max_position_embeddings)
    if config.integer("original_max_position_embeddings", stated) != stated:
        raise config.fail("original_max_position_embeddings", f"the rotary settings say {stated}")
    return stated


def _yarn(fields: JsonFields, factor: float) -> dict[str, Any]:
    for key, neutral in _YARN_NEUTRAL.items():
        if fields.values.get(key, neutral) != neutral:
            raise fields.unsupported(key, f"; only {neutral} is")

    def optional(key: str) -> float | None:
        return fields.number(key, can_be_zero=True) or None if key in fields else None  # 0 means unset, as elsewhere

    mscale, mscale_all_dim = optional("mscale"), optional("mscale_all_dim")
    attention_factor, times = optional("attention_factor"), optional("attn_factor")
    if attention_factor is None and times is not None:  # it multiplies YaRN's own, as in GGUF files and in vLLM
        attention_factor = times * yarn_attention_factor(factor, mscale, mscale_all_dim)
    return {
        "beta_fast": fields.number("beta_fast", 32.0),
        "beta_slow": fields.number("beta_slow", 1.0),
        "attention_factor": attention_factor,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "truncate": fields.flag("truncate", True),
    }
