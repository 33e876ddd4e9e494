"""Settings of Gemma 3 in a GGUF file: which layers have a window, their rotary base, the scale of attention.

llama.cpp's converter leaves out what llama.cpp's own code knows of the published models (`src/models/gemma3.cpp`).
"""

from typing import Any

from octavo.config.json_fields import JsonFields
from octavo.gguf.file import GgufFile

FULL_EVERY = 6  # layers: the last one of so many sees the whole context, unless the file says otherwise
LOCAL_THETA = 10000.0
_LAYERS_OF_27B = 62


def gemma3_settings(file: GgufFile, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` that other architectures lack or have differently.

    `rope` has the rotary settings of layers without a window.

    Raises:
        CheckpointError: a setting is missing or malformed.
    """
    fields = JsonFields(str(file.path), file.metadata)
    num_layers, num_heads = fields.integer("gemma3.block_count"), fields.integer("gemma3.attention.head_count")
    hidden_size = fields.integer("gemma3.embedding_length")
    head_dim = fields.integer("gemma3.attention.key_length", hidden_size // num_heads)
    window = fields.integer("gemma3.attention.sliding_window", 0, minimum=0)
    local = fields.number("gemma3.rope.freq_base_swa", LOCAL_THETA)
    cap = fields.number("gemma3.final_logit_softcapping", 0.0, can_be_zero=True)
    return {
        "sliding_window": window or None,
        "layer_types": _layer_types(fields, num_layers) if window else ["full_attention"] * num_layers,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": attention_divisor(num_layers, hidden_size, num_heads, head_dim),
        "final_logit_softcapping": cap or None,
    }


def attention_divisor(num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> int:
    """Return the number whose square root divides scores: it is not in the file, and differs for the largest model."""
    return hidden_size // num_heads if num_layers == _LAYERS_OF_27B else head_dim


def _layer_types(fields: JsonFields, num_layers: int) -> list[str]:
    """Return `layer_types`. A number n stands for n - 1 layers with a window and one without, over and over."""
    key = "gemma3.attention.sliding_window_pattern"
    pattern = fields.values.get(key, FULL_EVERY)
    if not isinstance(pattern, list):
        every = fields.integer(key, FULL_EVERY)
        pattern = [index % every < every - 1 for index in range(num_layers)]
    elif len(pattern) != num_layers:
        raise fields.fail(key, f"one entry for each of {num_layers} layers is expected")
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
