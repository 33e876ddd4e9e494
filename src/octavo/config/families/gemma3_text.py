"""EmbeddingGemma (Schechter Vera et al. 2025, arXiv:2509.20354): Gemma 3 whose tokens see both sides."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.families.gemma3 import FAMILIES as GEMMA3
from octavo.config.family import Family, GgufKeys, Layers
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.model import EncoderConfig


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    """Read them as Gemma 3's; the window of a checkpoint counts both sides."""
    layers, rotary = read_layers(
        without_keys(fields, "use_bidirectional_attention"), replace(family, read_layers=None), max_position_embeddings
    )
    windows = [layer.attention.sliding_window for layer in layers]
    return tuple(
        layer if window is None else layer.with_attention(sliding_window=window // 2 + 1)
        for layer, window in zip(layers, windows, strict=True)
    ), rotary


def _read_encoder(fields: JsonFields) -> EncoderConfig:
    if fields.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise fields.unsupported("hidden_activation", "; known: gelu_pytorch_tanh")
    return EncoderConfig(
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation="gelu_tanh",
        is_gated=True,
        has_embedding_norm=False,
        has_final_norm=True,
    )


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Gemma 3's settings, and the linears behind pooling that newer files have."""
    assert GEMMA3[0].gguf is not None, "it has GGUF files"
    return {**GEMMA3[0].gguf.settings(keys, so_far), "use_bidirectional_attention": True}


assert GEMMA3[0].gguf is not None
_GGUF = replace(
    GEMMA3[0].gguf,
    architecture="gemma-embedding",
    settings=_gguf_settings,
    is_written=False,
    names={**GEMMA3[0].gguf.names, "dense_2": "dense_2", "dense_3": "dense_3"},
)
FAMILIES = (
    replace(
        GEMMA3[0],
        name="Gemma3TextModel",
        model="octavo.models.encoder:EncoderModel",
        read_layers=_read_layers,
        read_encoder=_read_encoder,
        weight_names={
            name.removeprefix("model."): {"norm": "last_norm"}.get(place, place)
            for name, place in GEMMA3[0].weight_names.items()
        },
        vector_sizes=(128, 256, 512),
        causal=GEMMA3[0].name,
        gguf=_GGUF,
    ),
)
