"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): an encoder with windows, rotation and gated MLPs."""

from dataclasses import replace
from typing import Any

from octavo.config.encoders import classifier, num_labels, read_activation, same_layers
from octavo.config.family import Family, Layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import RopeConfig, RotarySpec
from octavo.config.model import DenseStep, EncoderConfig, PoolingConfig
from octavo.errors import CheckpointError

_LAYER = "layers.{layer}"
_THETAS = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}


def _theta(fields: JsonFields, kind: str) -> float:
    key, default = _THETAS[kind]
    rope = fields.nested("rope_parameters").nested(kind)
    if rope.text("rope_type", "default") != "default":
        raise rope.unsupported("rope_type", "; only default is")
    return rope.number("rope_theta", fields.number(key, default))


def _types(fields: JsonFields, num_layers: int) -> list[str]:
    if "layer_types" not in fields:
        every = fields.integer("global_attn_every_n_layers", 3)
        return ["sliding_attention" if layer % every else "full_attention" for layer in range(num_layers)]
    types = fields.texts("layer_types")
    if len(types) != num_layers or not set(types) <= _THETAS.keys():
        raise CheckpointError(f"{fields.origin}: layer_types: {num_layers} of {', '.join(_THETAS)} are expected")
    return types


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    num_layers = fields.integer("num_hidden_layers")
    layers, (table,) = same_layers(
        fields,
        num_layers,
        has_bias=fields.flag("attention_bias", False),
        has_mlp_bias=fields.flag("mlp_bias", False),
        intermediate_size=fields.integer("intermediate_size"),
        rope_theta=_theta(fields, "full_attention"),
    )
    local = RotarySpec(rope=RopeConfig(theta=_theta(fields, "sliding_attention")), width=table.width)
    window = fields.integer("local_attention", 128) // 2 + 1  # on each side, the token itself included
    return tuple(
        layer.with_attention(sliding_window=window, rotary=1) if kind == "sliding_attention" else layer
        for layer, kind in zip(layers, _types(fields, num_layers), strict=True)
    ), (table, local)


def _read_encoder(fields: JsonFields) -> EncoderConfig:
    return EncoderConfig(
        norm_eps=fields.number("norm_eps", 1e-5),
        has_norm_bias=fields.flag("norm_bias", False),
        activation=read_activation(fields, "hidden_activation", "gelu", ("gelu", "gelu_tanh", "silu")),
        is_gated=True,
        has_final_norm=True,
        has_first_norm=False,
    )


def _read_classifier(fields: JsonFields) -> PoolingConfig:
    size, kind = fields.integer("hidden_size"), fields.text("classifier_pooling", "cls")
    if kind not in ("cls", "mean"):
        raise fields.unsupported("classifier_pooling", "; known: cls, mean")
    if fields.text("classifier_activation", "gelu") != "gelu":
        raise fields.unsupported("classifier_activation", "; only gelu is")
    head = DenseStep(
        name="head.dense",
        in_size=size,
        out_size=size,
        has_bias=fields.flag("classifier_bias", False),
        activation="gelu",
        norm_name="head.norm",
        norm_eps=fields.number("norm_eps", 1e-5),
        has_norm_bias=fields.flag("norm_bias", False),
    )
    last = DenseStep(name="classifier", in_size=size, out_size=num_labels(fields))
    return classifier("mean" if kind == "mean" else "cls", head, last)


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
}
_MODERN = Family(
    name="ModernBertModel",
    model_type="modernbert",
    model="octavo.models.encoder:EncoderModel",
    read_layers=_read_layers,
    read_encoder=_read_encoder,
    weight_names={
        "embeddings.tok_embeddings": "embedding",
        "embeddings.norm": "embedding_norm",
        f"{_LAYER}.attn_norm": "layers.{layer}.attention_norm",
        f"{_LAYER}.attn.Wqkv.q": "layers.{layer}.attention.qkv:q",
        f"{_LAYER}.attn.Wqkv.k": "layers.{layer}.attention.qkv:k",
        f"{_LAYER}.attn.Wqkv.v": "layers.{layer}.attention.qkv:v",
        f"{_LAYER}.attn.Wo": "layers.{layer}.attention.out",
        f"{_LAYER}.mlp_norm": "layers.{layer}.mlp_norm",
        f"{_LAYER}.mlp.Wi.gate": "layers.{layer}.mlp.gate_up:gate",
        f"{_LAYER}.mlp.Wi.up": "layers.{layer}.mlp.gate_up:up",
        f"{_LAYER}.mlp.Wo": "layers.{layer}.mlp.down",
        "final_norm": "last_norm",
    },
    other_spellings={
        f"{_LAYER}.{whole}.{kind}": tuple(f"{_LAYER}.{whole}.{part}.{kind}" for part in parts)
        for whole, parts in (("attn.Wqkv", ("q", "k", "v")), ("mlp.Wi", ("gate", "up")))
        for kind in ("weight", "bias")
    },
    defaults=_DEFAULTS,
)
FAMILIES = (
    _MODERN,
    replace(_MODERN, name="ModernBertForMaskedLM"),
    replace(_MODERN, name="ModernBertForSequenceClassification", read_classifier=_read_classifier),
)
