"""BERT (Devlin et al. 2018, arXiv:1810.04805), and with a classifier: an encoder of vectors and ranks."""

from dataclasses import replace
from typing import Any

from octavo.config.encoders import classifier, num_labels, read_activation, same_layers
from octavo.config.family import Family, GgufFacts, Layers, NameTable
from octavo.config.json_fields import JsonFields
from octavo.config.model import DenseStep, EncoderConfig, PoolingConfig

_LAYER = "encoder.layer.{layer}"
BERT_NAMES: NameTable = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "embedding_norm",
    f"{_LAYER}.attention.self.query": "layers.{layer}.attention.qkv:q",
    f"{_LAYER}.attention.self.key": "layers.{layer}.attention.qkv:k",
    f"{_LAYER}.attention.self.value": "layers.{layer}.attention.qkv:v",
    f"{_LAYER}.attention.output.dense": "layers.{layer}.attention.out",
    f"{_LAYER}.attention.output.LayerNorm": "layers.{layer}.attention_norm",
    f"{_LAYER}.intermediate.dense": "layers.{layer}.mlp.up",
    f"{_LAYER}.output.dense": "layers.{layer}.mlp.down",
    f"{_LAYER}.output.LayerNorm": "layers.{layer}.mlp_norm",
}
BERT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


BERT_GGUF = GgufFacts(
    architecture="bert",
    fits=lambda keys: "rope.freq_base" not in keys,
    names={
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    settings=lambda keys, so_far: {"layer_norm_eps": keys.number("attention.layer_norm_epsilon")},
)


def read_bert_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    """Return layers that are all alike, without rotation."""
    return same_layers(
        fields,
        fields.integer("num_hidden_layers"),
        has_bias=True,
        intermediate_size=fields.integer("intermediate_size"),
    )


def read_bert(fields: JsonFields) -> EncoderConfig:
    """Return what the layers do beside their specs."""
    if fields.flag("is_decoder", False):
        raise fields.unsupported("is_decoder")
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.unsupported("position_embedding_type", "; only absolute is")
    return EncoderConfig(
        norm_eps=fields.number("layer_norm_eps"),
        activation=read_activation(fields, "hidden_act", "gelu", ("gelu", "gelu_tanh", "relu")),
        num_token_types=fields.integer("type_vocab_size"),
        has_positions=True,
    )


def _read_classifier(fields: JsonFields) -> PoolingConfig:
    size = fields.integer("hidden_size")
    return classifier(
        "cls",
        DenseStep(name="pooler.dense", in_size=size, out_size=size, activation="tanh"),
        DenseStep(name="classifier", in_size=size, out_size=num_labels(fields)),
    )


BERT = Family(
    name="BertModel",
    model_type="bert",
    model="octavo.models.encoder:EncoderModel",
    read_layers=read_bert_layers,
    read_encoder=read_bert,
    weight_names=BERT_NAMES,
    norms="after",
    defaults=BERT_DEFAULTS,
    gguf=BERT_GGUF,
)
FAMILIES = (
    BERT,
    replace(BERT, name="BertForMaskedLM"),
    replace(BERT, name="BertForSequenceClassification", read_classifier=_read_classifier),
)
