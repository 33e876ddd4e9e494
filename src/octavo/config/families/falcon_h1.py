"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and Mamba-2 beside each other in every layer, and multipliers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from msgspec import structs

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, GgufKeys, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import DenseSpec, Mamba2Spec
from octavo.config.mamba2 import read_mamba2


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, rotary = read_layers(fields, family, max_position_embeddings)
    before, after = (fields.number(f"attention_{at}_multiplier", 1.0) for at in ("in", "out"))
    attention, dense = layers[0].attention, layers[0].feed_forward
    assert isinstance(dense, DenseSpec), "all layers have an MLP"
    if attention.has_bias and before != 1.0:
        raise fields.unsupported("attention_in_multiplier", " with attention_bias")
    # What keys and queries are multiplied by shows in their products alone, and what values are in the result.
    scale = attention.head_dim**-0.5 * before**2 * fields.number("key_multiplier", 1.0)
    gates, results = fields.numbers("mlp_multipliers", 2) if "mlp_multipliers" in fields else (1.0, 1.0)
    layer = replace(
        layers[0].with_attention(scale=scale),
        feed_forward=structs.replace(dense, gate_scale=gates, out_scale=results),
        beside=_mamba2(fields),
        mixer_scales=(before * after, fields.number("ssm_out_multiplier", 1.0)),
    )
    return (layer,) * len(layers), rotary


def _mamba2(fields: JsonFields) -> Mamba2Spec:
    width = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    if "mamba_d_ssm" not in fields.nulls:
        width = fields.integer("mamba_d_ssm", 1024)
    num_heads = fields.integer("mamba_n_heads")
    if width % num_heads:
        raise fields.fail("mamba_n_heads", f"a divisor of mamba_d_ssm ({width}) is expected")
    head_dim = width // num_heads
    if fields.values.get("mamba_d_head", "auto") not in ("auto", head_dim):
        raise fields.fail("mamba_d_head", f"mamba_d_ssm / mamba_n_heads ({head_dim}) is expected")
    spec = read_mamba2(
        fields,
        heads="mamba_n_heads",
        head_dim=head_dim,
        groups=("mamba_n_groups", 1),
        state=("mamba_d_state", 256),
        conv=("mamba_d_conv", 4),
        norm=_norm(fields),
        has_bias=fields.flag("mamba_proj_bias", False),
        has_out_bias=fields.flag("projectors_bias", False),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
    )
    times = fields.number("ssm_in_multiplier", 1.0)
    if spec.has_bias and times != 1.0:
        raise fields.unsupported("ssm_in_multiplier", " with mamba_proj_bias")
    by_part = fields.numbers("ssm_multipliers", 5) if "ssm_multipliers" in fields else (1.0,) * 5
    gates, values, keys, queries, steps = (times * factor for factor in by_part)
    return structs.replace(spec, input_scales=(gates, values, keys, queries, steps))


def _norm(fields: JsonFields) -> Literal["after_gate", "before_gate", "none"]:
    if not fields.flag("mamba_rms_norm", False):
        return "none"
    return "before_gate" if fields.flag("mamba_norm_before_gate", True) else "after_gate"


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json`'s keys. Files have no multipliers: their weights are multiplied already."""
    return {
        "mamba_d_ssm": keys.integer("ssm.inner_size"),
        "mamba_n_heads": keys.integer("ssm.time_step_rank"),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_rms_norm": any(name.endswith("ssm_norm.weight") for name in keys.tensors),
        "mamba_norm_before_gate": False,  # as llama.cpp computes all of them
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in keys.tensors),
    }


_LAYER, _PLACE = "model.layers.{layer}", "layers.{layer}"
_MAMBA, _MIXER = f"{_LAYER}.mamba", f"{_PLACE}.beside"
_MLP = f"{_LAYER}.feed_forward"
_DROPPED = (f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.mlp.", "model.norm")
FAMILIES = (
    Family(
        name="FalconH1ForCausalLM",
        model_type="falcon_h1",
        model="octavo.models.falcon_h1:FalconH1ForCausalLM",
        read_layers=_read_layers,
        weight_names={
            **{name: place for name, place in DECODER_NAMES.items() if not name.startswith(_DROPPED)},
            "model.final_layernorm": "norm",
            f"{_LAYER}.pre_ff_layernorm": f"{_PLACE}.mlp_norm",
            f"{_MLP}.gate_proj": f"{_PLACE}.mlp.gate_up:gate",
            f"{_MLP}.up_proj": f"{_PLACE}.mlp.gate_up:up",
            f"{_MLP}.down_proj": f"{_PLACE}.mlp.down",
            _MAMBA: f"{_MIXER}.space",  # numbers without names of their own
            f"{_MAMBA}.conv1d": f"{_MIXER}.space:conv",
            f"{_MAMBA}.in_proj": f"{_MIXER}.rows",
            f"{_MAMBA}.norm": f"{_MIXER}.norm",
            f"{_MAMBA}.out_proj": f"{_MIXER}.output",
        },
        num_kv_heads=8,
        has_mlp_bias_key=True,
        has_multipliers=True,
        rms_norm_eps=1e-5,
        defaults={
            "vocab_size": 128000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 8192,
            "mamba_n_heads": 128,
        },
        gguf=GgufFacts(
            architecture="falcon-h1",
            names={
                "output_norm": "model.final_layernorm",
                "ffn_norm": "pre_ff_layernorm",
                "ffn_gate": "feed_forward.gate_proj",
                "ffn_up": "feed_forward.up_proj",
                "ffn_down": "feed_forward.down_proj",
                "ssm_in": "mamba.in_proj",
                "ssm_conv1d": "mamba.conv1d",
                "ssm_a.": "mamba.A_log",
                "ssm_d.": "mamba.D",
                "ssm_dt.bias": "mamba.dt_bias",
                "ssm_norm": "mamba.norm",
                "ssm_out": "mamba.out_proj",
            },
            settings=_gguf_settings,
        ),
    ),
)
