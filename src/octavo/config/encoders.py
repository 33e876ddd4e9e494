"""What families of encoders share: models whose tokens see both sides, and which make vectors instead of text."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from octavo.config.family import Family
from octavo.config.json_fields import JsonFields
from octavo.config.layers import AttentionSpec, DenseSpec, LayerSpec, RopeConfig, RotarySpec
from octavo.config.model import (
    CheckpointQuantization,
    DenseStep,
    DType,
    MLPActivation,
    ModelConfig,
    PoolingConfig,
    PoolingKind,
)
from octavo.errors import InvalidParameterError

logger = logging.getLogger(__name__)

_ACTIVATIONS: MappingProxyType[str, MLPActivation] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "silu": "silu",
        "swiglu": "silu",
        "relu": "relu",
    }
)


def read_activation(fields: JsonFields, key: str, default: str, known: Sequence[MLPActivation]) -> MLPActivation:
    """Return an activation by its name in a checkpoint. Raises UnsupportedModelError: not one of those known."""
    found = _ACTIVATIONS.get(fields.text(key, default))
    if found is None or found not in known:
        names = [name for name, kind in _ACTIVATIONS.items() if kind in known]
        raise fields.unsupported(key, f"; known: {', '.join(names)}")
    return found


def same_layers(
    fields: JsonFields,
    num_layers: int,
    *,
    has_bias: bool,
    intermediate_size: int,
    rope_theta: float | None = None,
    has_mlp_bias: bool | None = None,
) -> tuple[tuple[LayerSpec, ...], tuple[RotarySpec, ...]]:
    """Return layers that are all alike; without `rope_theta`, positions are embedded instead of rotated by."""
    num_heads, size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if size % num_heads:
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}) is expected")
    rotary = () if rope_theta is None else (RotarySpec(rope=RopeConfig(theta=rope_theta), width=size // num_heads),)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=size // num_heads,
        rotary=None if rope_theta is None else 0,
        has_bias=has_bias,
        has_out_bias=has_bias,
    )
    dense = DenseSpec(intermediate_size=intermediate_size, has_bias=has_bias if has_mlp_bias is None else has_mlp_bias)
    return (LayerSpec(attention, dense),) * num_layers, rotary


def num_labels(fields: JsonFields) -> int:
    """Return the outputs of a classifier."""
    return len(fields.nested("id2label").values) or fields.integer("num_labels", 2)


def classifier(kind: PoolingKind, *steps: DenseStep) -> PoolingConfig:
    """Return how the states of a pair of texts become scores."""
    return PoolingConfig(kind=kind, normalizes=False, dense=steps, num_scores=steps[-1].out_size, is_stated=True)


def encoder_config(
    fields: JsonFields,
    family: Family,
    *,
    model: str,
    path: str,
    dtype: DType,
    max_model_len: int | None,
    quantization: CheckpointQuantization | None,
) -> ModelConfig:
    """Return the configuration of an encoder.

    Raises InvalidParameterError: `max_model_len`, in tokens of a prompt, exceeds what the checkpoint supports.
    """
    assert family.read_encoder is not None, "of encoders"
    assert family.read_layers is not None, "encoders say what their layers are"
    longest = fields.integer("max_position_embeddings") - family.position_offset
    if longest < 1:
        raise fields.fail("max_position_embeddings", f"more than {family.position_offset} are expected")
    if max_model_len is not None and max_model_len > longest:
        limit = f"at most {longest}, which is what the checkpoint supports"
        raise InvalidParameterError("max_model_len", max_model_len, limit)
    layers, rotary = family.read_layers(fields, family, longest)
    encoder = family.read_encoder(fields)
    if encoder.has_positions:
        encoder = replace(encoder, num_positions=longest, position_offset=family.position_offset)
    pooling = PoolingConfig(kind="mean") if family.read_classifier is None else family.read_classifier(fields)
    return ModelConfig(
        model=model,
        path=path,
        architecture=family.name,
        dtype=dtype,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        rotary=rotary,
        max_position_embeddings=longest,
        max_model_len=(longest if max_model_len is None else max_model_len) + 1,  # a place for the output that is none
        rms_norm_eps=encoder.norm_eps,
        norm_offset=family.norm_offset,
        norms=family.norms,
        embedding_scale=float(fields.integer("hidden_size") ** 0.5) if family.scales_embedding else None,
        rounds_embedding_scale=family.scales_embedding,
        quantization=quantization,
        has_head=False,
        encoder=encoder,
        pooling=pooling,
    )
