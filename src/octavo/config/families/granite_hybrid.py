"""Granite 4 (IBM 2025), dense and with experts: Mamba-2 (arXiv:2405.21060), attention in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.family import DECODER_NAMES, Family, GgufFacts, GgufKeys, Layers, expert_names
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.layers import DenseSpec, ExpertsSpec, FeedForward, Mamba2Spec, RoutingSpec
from octavo.config.mamba2 import ATTENTION_KINDS, MAMBA_KINDS, read_mamba2
from octavo.errors import CheckpointError, UnsupportedModelError

_EXPERT_KEYS = ("num_local_experts", "num_experts", "num_experts_per_tok")


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    plain = without_keys(fields, "layer_types", "layers_block_type", *_EXPERT_KEYS)
    layers, rotary = read_layers(plain, family, max_position_embeddings)
    rotates = fields.text("position_embedding_type", "nope")
    if rotates not in ("rope", "nope"):
        raise fields.unsupported("position_embedding_type", "; known: rope, nope")
    attention = {"scale": fields.number("attention_multiplier", 1.0), "rotary": 0 if rotates == "rope" else None}
    mamba, after = _mamba2(fields), _feed_forward(fields)
    kinds = zip(_kinds(fields, len(layers)), layers, strict=True)
    return tuple(
        replace(layer, mixer=mamba, feed_forward=after)
        if kind in MAMBA_KINDS
        else replace(layer.with_attention(**attention), feed_forward=after)
        for kind, layer in kinds
    ), rotary if rotates == "rope" else ()


def _kinds(fields: JsonFields, num_layers: int) -> list[str]:
    key = "layer_types" if "layer_types" in fields else "layers_block_type"
    kinds = fields.texts(key) if key in fields else ["mamba"] * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"{fields.origin}: {key}: {num_layers} entries are expected, found {len(kinds)}")
    if unknown := sorted(set(kinds) - MAMBA_KINDS - ATTENTION_KINDS):
        raise UnsupportedModelError(f"{fields.origin}: {key}: {unknown[0]!r} is not supported")
    return kinds


def _mamba2(fields: JsonFields) -> Mamba2Spec:
    width = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    num_heads = fields.integer("mamba_n_heads")
    if width % num_heads:
        raise fields.fail("mamba_n_heads", f"a divisor of mamba_expand * hidden_size ({width}) is expected")
    stated = fields.values.get("mamba_d_head", "auto")
    if stated not in ("auto", width // num_heads):
        raise fields.fail(
            "mamba_d_head", f"mamba_expand * hidden_size / mamba_n_heads ({width // num_heads}) is expected"
        )
    return read_mamba2(
        fields,
        heads="mamba_n_heads",
        head_dim=width // num_heads,
        groups=("mamba_n_groups", 1),
        state=("mamba_d_state", 256),
        conv=("mamba_d_conv", 4),
        has_bias=fields.flag("mamba_proj_bias", False),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
    )


def _feed_forward(fields: JsonFields) -> FeedForward:
    """Return what every layer has: an MLP that all tokens use, beside experts if there are any."""
    shared = fields.integer("shared_intermediate_size", 1024)
    num_experts = fields.integer("num_local_experts", fields.integer("num_experts", 8, minimum=0), minimum=0)
    if not num_experts:
        return DenseSpec(intermediate_size=shared)
    top_k = fields.integer("num_experts_per_tok", 2)
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most as many as there are experts ({num_experts})")
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("intermediate_size"),
        shared_intermediate_size=shared,
        renormalizes=True,
        routing=RoutingSpec(gates_shared=False),
    )


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    heads, num_layers = keys.values.get("attention.head_count_kv"), keys.integer("block_count")
    if not isinstance(heads, list) or len(heads) != num_layers:
        raise keys.fail("attention.head_count_kv", f"an entry for each of {num_layers} layers is expected")
    width, num_heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if width % (hidden_size := keys.integer("embedding_length")):
        raise keys.fail("ssm.inner_size", f"a multiple of embedding_length ({hidden_size}) is expected")
    has_experts = bool(keys.values.get("expert_count"))
    shared = "expert_shared_feed_forward_length"
    return {
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "num_key_value_heads": next((count for count in heads if count), None),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", False) else "nope",
        "num_experts": None,
        "num_local_experts": keys.integer("expert_count") if has_experts else 0,
        "intermediate_size": keys.values.get("expert_feed_forward_length") or so_far["intermediate_size"],
        "shared_intermediate_size": keys.values.get(shared) or so_far["intermediate_size"],
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "mamba_expand": width // hidden_size,
        "mamba_n_heads": num_heads,
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in keys.tensors),
    }


_LAYER, _PLACE = "model.layers.{layer}", "layers.{layer}"
_MAMBA, _MIXER = f"{_LAYER}.mamba", f"{_PLACE}.attention"
_SHARED, _MOE = f"{_LAYER}.shared_mlp", f"{_LAYER}.block_sparse_moe"
_EXPERT = _MOE + ".experts.{expert}"
_MLP_NAMES = frozenset(name for name in DECODER_NAMES if ".mlp." in name)
FAMILIES = (
    Family(
        name="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        model="octavo.models.granite_hybrid:GraniteHybridForCausalLM",
        read_layers=_read_layers,
        weight_names={
            **{name: place for name, place in DECODER_NAMES.items() if name not in _MLP_NAMES},
            _MAMBA: f"{_MIXER}.space",  # numbers without names of their own
            f"{_MAMBA}.conv1d": f"{_MIXER}.space:conv",
            f"{_MAMBA}.in_proj": f"{_MIXER}.rows",
            f"{_MAMBA}.norm": f"{_MIXER}.norm",
            f"{_MAMBA}.out_proj": f"{_MIXER}.output",
            **expert_names(f"{_MOE}.router.layer", _EXPERT),
            f"{_SHARED}.gate_proj": f"{_PLACE}.mlp.shared_expert.gate_up:gate",
            f"{_SHARED}.up_proj": f"{_PLACE}.mlp.shared_expert.gate_up:up",
            f"{_SHARED}.output_linear": f"{_PLACE}.mlp.shared_expert.down",
        },
        other_spellings={
            f"{_SHARED}.input_linear.weight": (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"),
            f"{_MOE}.input_linear.weight": (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
            f"{_MOE}.output_linear.weight": (f"{_EXPERT}.down_proj.weight",),
        },
        has_multipliers=True,
        defaults={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "mamba_n_heads": 128,
        },
        gguf=GgufFacts(
            architecture="granitehybrid",
            names={
                "ssm_in": "mamba.in_proj",
                "ssm_conv1d": "mamba.conv1d",
                "ssm_a.": "mamba.A_log",
                "ssm_d.": "mamba.D",
                "ssm_dt.bias": "mamba.dt_bias",
                "ssm_norm": "mamba.norm",
                "ssm_out": "mamba.out_proj",
                "ffn_gate": "shared_mlp.gate_proj",
                "ffn_up": "shared_mlp.up_proj",
                "ffn_down": "shared_mlp.output_linear",
                "ffn_gate_shexp": "shared_mlp.gate_proj",
                "ffn_up_shexp": "shared_mlp.up_proj",
                "ffn_down_shexp": "shared_mlp.output_linear",
                "ffn_gate_inp": "block_sparse_moe.router.layer",
                "ffn_gate_exps": "block_sparse_moe.experts.{expert}.gate_proj",
                "ffn_up_exps": "block_sparse_moe.experts.{expert}.up_proj",
                "ffn_down_exps": "block_sparse_moe.experts.{expert}.down_proj",
            },
            settings=_gguf_settings,
            interleaves_rows=True,
        ),
    ),
)
