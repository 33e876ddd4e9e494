"""LFM3 (Liquid AI 2026): short convolutions, attention with and without a window, norms around each branch."""

import math
from dataclasses import replace

from octavo.config.families.lfm2 import NAMES, read_short_conv
from octavo.config.family import Family, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import RotarySpec
from octavo.errors import CheckpointError, UnsupportedModelError

_CONV, _FULL, _SLIDING = "conv", "full_attention", "sliding_attention"


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    kinds = _kinds(fields)
    plain = _plain_rotary(fields).with_key("layer_types", [_FULL if kind == _CONV else kind for kind in kinds])
    layers, (full, local) = read_layers(plain, family, max_position_embeddings)
    has_gate, conv = fields.flag("use_attention_gate", True), read_short_conv(fields, default_size=7)
    mixed = (
        replace(layer, mixer=conv) if kind == _CONV else layer.with_attention(gate="heads" if has_gate else None)
        for kind, layer in zip(kinds, layers, strict=True)
    )
    table = RotarySpec(rope=replace(full.rope, divisors=_divisors(fields, full.width)), width=full.width)
    return tuple(mixed), (table, local)


def _kinds(fields: JsonFields) -> list[str]:
    num_layers = fields.integer("num_hidden_layers")
    if "layer_types" not in fields:
        return [_FULL if at % 4 == 2 else _SLIDING if at % 4 == 0 and at else _CONV for at in range(num_layers)]
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers:
        raise CheckpointError(f"{fields.origin}: layer_types: {num_layers} entries are expected, found {len(kinds)}")
    if unknown := sorted(set(kinds) - {_CONV, _FULL, _SLIDING}):
        raise UnsupportedModelError(f"{fields.origin}: layer_types: {unknown[0]!r} is not supported")
    if set(kinds) == {_CONV}:
        raise UnsupportedModelError(f"{fields.origin}: layer_types: one layer at least that attends is expected")
    return kinds


def _plain_rotary(fields: JsonFields) -> JsonFields:
    """Return the keys with rotary settings as other families have them: all of a head is rotated."""
    rope = {kind: dict(fields.nested("rope_parameters").nested(kind).values) for kind in (_FULL, _SLIDING)}
    kind = rope[_FULL].pop("rope_type", "proportional")
    rope[_FULL].pop("partial_rotary_factor", None)
    if kind not in ("default", "proportional"):
        raise fields.nested("rope_parameters").nested(_FULL).unsupported("rope_type", "; known: default, proportional")
    return fields.with_key("rope_parameters", rope)


def _divisors(fields: JsonFields, width: int) -> tuple[float, ...]:
    """Return what the frequencies of pairs are divided by: those of the last ones are zero."""
    rope = fields.nested("rope_parameters").nested(_FULL)
    if rope.text("rope_type", "proportional") == "default":
        return ()
    factor = rope.number("partial_rotary_factor", 1.0 if rope.values else 0.5)
    num_rotated = int(factor * width // 2)
    if num_rotated > width // 2:
        raise rope.fail("partial_rotary_factor", "at most 1 is expected")
    return (1.0,) * num_rotated + (math.inf,) * (width // 2 - num_rotated)


_LAYER, _PLACE = "model.layers.{layer}", "layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
_OTHERS = ("out_proj", "q_layernorm", "k_layernorm")  # names that LFM2 has for parts of attention
FAMILIES = (
    Family(
        name="Lfm3ForCausalLM",
        model_type="lfm3",
        read_layers=_read_layers,
        weight_names={
            **{
                name: place
                for name, place in NAMES.items()
                if not name.endswith(tuple(f"self_attn.{of}" for of in _OTHERS))
            },
            f"{_ATTENTION}.o_proj": f"{_PLACE}.attention.out",
            f"{_ATTENTION}.q_norm": f"{_PLACE}.attention.head_norms:query",
            f"{_ATTENTION}.k_norm": f"{_PLACE}.attention.head_norms:key",
            f"{_ATTENTION}.gate_proj": f"{_PLACE}.attention.gates",
            f"{_LAYER}.post_operator_norm": f"{_PLACE}.post_attention_norm",
            f"{_LAYER}.post_ffn_norm": f"{_PLACE}.post_mlp_norm",
        },
        other_spellings={f"{_ATTENTION}.g_proj.weight": (f"{_ATTENTION}.gate_proj.weight",)},
        usual_keys={"norm_eps": "rms_norm_eps"},
        num_kv_heads=4,
        head_dim=128,
        window_rule="pattern",
        window=256,
        head_norms="each",
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        local_rope_theta=1e4,
        norms="around",
        defaults={
            "vocab_size": 128000,
            "hidden_size": 2048,
            "intermediate_size": 7680,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 128000,
            "tie_word_embeddings": True,
        },
    ),
)
