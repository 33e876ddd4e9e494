"""Reads models that take images from `config.json`: the vision tower, and the keys of the language model.

Gemma 3 and LLaVA have plain vision transformers, SigLIP and CLIP; Qwen2-VL and its successors have their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config.family import Family
from octavo.config.json_fields import JsonFields
from octavo.config.model import VisionActivation

_ACTIVATIONS: dict[str, VisionActivation] = {
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
SIGLIP, CLIP = "siglip_vision_model", "clip_vision_model"


def text_part(fields: JsonFields, family: Family, families: Mapping[str, Family]) -> tuple[JsonFields, Family]:
    """Return the language model's keys and its family: the model's own, or the one that `text_config` names.

    Its keys are under `text_config`, or in older files next to the others.
    """
    text = fields.nested("text_config")
    values: dict[str, Any] = {**fields.values, **dict.fromkeys(fields.nulls), **text.values}
    values |= dict.fromkeys(text.nulls)
    # Files have it in either place; but where true is the default, `text_config` repeats it unasked.
    is_default = family.defaults.get("tie_word_embeddings", False)
    ties = (fields,) if is_default else (fields, text)
    values["tie_word_embeddings"] = any(of.flag("tie_word_embeddings", is_default) for of in ties)
    part = JsonFields(fields.origin, values)
    if family.read_tower is not None and "final_logit_softcapping" in part:  # without effect in transformers
        raise part.unsupported("final_logit_softcapping", " with a vision tower")
    if family.text:
        known = {families[name].model_type: name for name in family.text}
        kind = text.text("model_type", next(iter(known)))
        if kind not in known:
            raise text.unsupported("model_type", f"; known: {', '.join(known)}")
        family = replace(families[known[kind]], defaults=family.defaults.get(kind, {}))
    return part, family


def read_plain_tower(vision: JsonFields, out_hidden_size: int) -> dict[str, Any]:
    """Read what SigLIP and CLIP share."""
    is_clip = vision.text("model_type", SIGLIP) == CLIP
    hidden_size, num_heads = vision.integer("hidden_size", 768), vision.integer("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise vision.fail("num_attention_heads", f"a divisor of hidden_size ({hidden_size}) is expected")
    image_size, patch_size = vision.integer("image_size", 224), vision.integer("patch_size", 32 if is_clip else 16)
    if image_size < patch_size:
        raise vision.fail("image_size", f"at least patch_size ({patch_size}) is expected")
    return {
        "num_layers": vision.integer("num_hidden_layers", 12),
        "hidden_size": hidden_size,
        "intermediate_size": vision.integer("intermediate_size", 3072),
        "num_heads": num_heads,
        "out_hidden_size": out_hidden_size,
        "in_channels": vision.integer("num_channels", 3),
        "image_size": image_size,
        "patch_size": patch_size,
        "temporal_patch_size": 1,
        "position_grid": image_size // patch_size,
        "activation": read_activation(vision, "quick_gelu" if is_clip else "gelu_pytorch_tanh"),
        "norm_eps": vision.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
    }


def read_activation(vision: JsonFields, default: str) -> VisionActivation:
    name = vision.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        raise vision.unsupported("hidden_act", f"; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_token(fields: JsonFields, name: str, default: int) -> int:
    """Return a token's id, under either of the names that files have for it."""
    return fields.integer(f"{name}_index", fields.integer(f"{name}_id", default, minimum=0), minimum=0)
