"""Nomic's BERT (Nussbaum et al. 2024, arXiv:2402.01613): an encoder with rotation and gated MLPs, norms behind them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.encoders import read_activation, same_layers
from octavo.config.family import Family, GgufFacts, Layers
from octavo.config.json_fields import JsonFields
from octavo.config.model import EncoderConfig

_LAYER = "encoder.layers.{layer}"
# Of the publisher's own code: to the usual ones.
_KEYS: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
}
_NEUTRAL: Mapping[str, Any] = {
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
    "moe_every_n_layers": 0,
}


def _check(fields: JsonFields) -> None:
    for key, neutral in _NEUTRAL.items():
        if fields.values.get(key, neutral) != neutral:
            raise fields.unsupported(key, f"; only {neutral} is")


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    _check(fields)
    rope = fields.nested("rope_parameters")
    if rope.text("rope_type", "default") != "default":
        raise rope.unsupported("rope_type", "; only default is")
    return same_layers(
        fields,
        fields.integer("num_hidden_layers"),
        has_bias=False,
        intermediate_size=fields.integer("intermediate_size"),
        rope_theta=rope.number("rope_theta", fields.number("rotary_emb_base", 1000.0)),
    )


def _read_encoder(fields: JsonFields) -> EncoderConfig:
    return EncoderConfig(
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=read_activation(fields, "hidden_act", "silu", ("silu",)),
        is_gated=True,
        num_token_types=fields.integer("type_vocab_size", 2),
    )


_GGUF = GgufFacts(
    architecture="nomic-bert",
    names={
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "attn_q": "attn.Wqkv.q",
        "attn_k": "attn.Wqkv.k",
        "attn_v": "attn.Wqkv.v",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_gate": "mlp.fc12",
        "ffn_up": "mlp.fc11",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
    settings=lambda keys, so_far: {"layer_norm_eps": keys.number("attention.layer_norm_epsilon")},
)
_NOMIC = Family(
    name="NomicBertModel",
    model_type="nomic_bert",
    model="octavo.models.encoder:EncoderModel",
    usual_keys=_KEYS,
    read_layers=_read_layers,
    read_encoder=_read_encoder,
    weight_names={
        "embeddings.word_embeddings": "embedding",
        "embeddings.token_type_embeddings": "token_types",
        "emb_ln": "embedding_norm",
        f"{_LAYER}.attn.Wqkv.q": "layers.{layer}.attention.qkv:q",
        f"{_LAYER}.attn.Wqkv.k": "layers.{layer}.attention.qkv:k",
        f"{_LAYER}.attn.Wqkv.v": "layers.{layer}.attention.qkv:v",
        f"{_LAYER}.attn.out_proj": "layers.{layer}.attention.out",
        f"{_LAYER}.norm1": "layers.{layer}.attention_norm",
        f"{_LAYER}.mlp.fc12": "layers.{layer}.mlp.gate_up:gate",
        f"{_LAYER}.mlp.fc11": "layers.{layer}.mlp.gate_up:up",
        f"{_LAYER}.mlp.fc2": "layers.{layer}.mlp.down",
        f"{_LAYER}.norm2": "layers.{layer}.mlp_norm",
    },
    other_spellings={
        f"{_LAYER}.attn.Wqkv.weight": tuple(f"{_LAYER}.attn.Wqkv.{part}.weight" for part in ("q", "k", "v"))
    },
    norms="after",
    defaults={
        "vocab_size": 30528,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
    },
    gguf=_GGUF,
)
FAMILIES = (_NOMIC, replace(_NOMIC, name="NomicBertForMaskedLM"))
