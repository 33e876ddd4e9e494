"""Reads rotary embedding settings from `config.json`, in the formats of transformers 4 and 5.

Version 4 writes `rope_theta` and `rope_scaling: {type | rope_type, ...}` or null; version 5 writes one object
`rope_parameters: {rope_theta, rope_type, ...}`.
"""

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast, get_args

from octavo.config.architectures import ArchitectureFacts
from octavo.config.hf_quantization import GGUF_TYPES
from octavo.config.json_fields import JsonFields
from octavo.config.model import RopeConfig, RopeKind
from octavo.errors import UnsupportedModelError

# The keys of the five types, and keys without effect that occur in real files.
_KNOWN_KEYS = frozenset(
    {
        *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
        *("low_freq_factor", "high_freq_factor"),
        *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"),
        *("attn_factor", "extrapolation_factor", "apply_yarn_scaling"),
    }
)
_YARN_NEUTRAL = MappingProxyType({"extrapolation_factor": 1.0, "apply_yarn_scaling": True})


def read_rope(config: JsonFields, facts: ArchitectureFacts, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """Read the rotary embedding settings. Positions with three axes divide the frequencies of a head among them."""
    fields = _merged(config)
    if not facts.has_rotary_axes:
        return _one_axis(config, fields, max_position_embeddings, facts.rope_theta)
    plain = {key: value for key, value in fields.values.items() if key not in ("mrope_section", "mrope_interleaved")}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":  # the name that older files give to three axes of the default kind
            plain[key] = "default"
    rope = _one_axis(config, JsonFields(fields.origin, plain), max_position_embeddings, facts.rope_theta)
    sections = tuple(fields.integers("mrope_section")) or facts.rotary_sections
    if len(sections) != 3 or sum(sections) != head_dim // 2:
        raise fields.fail("mrope_section", f"three numbers are expected that add up to {head_dim // 2}")
    return replace(rope, sections=sections, is_interleaved=fields.flag("mrope_interleaved", facts.interleaves_axes))


def read_local_rope(config: JsonFields, default_theta: float | None) -> RopeConfig | None:
    """Read the rotary settings of layers with a window, where they have their own; None: they do not.

    Version 4 writes `rope_local_base_freq`, version 5 `rope_parameters: {sliding_attention, full_attention}`.
    """
    if default_theta is None:
        return None
    by_kind = config.nested("rope_parameters")
    if unknown := sorted(by_kind.values.keys() - {"full_attention", "sliding_attention"}):
        raise by_kind.fail(unknown[0], "settings under full_attention and sliding_attention are expected")
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
            raise fields.fail(
                "low_freq_factor", f"less than high_freq_factor ({own['high_freq_factor']:g}) is expected"
            )
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
