"""Reads the vision towers of Gemma 3 and LLaVA from `config.json`: plain vision transformers, SigLIP and CLIP."""

import math
from typing import Any

from octavo.config.hf_vision_activation import read_activation
from octavo.config.json_fields import JsonFields
from octavo.config.vision import ClassToken, VisionConfig
from octavo.errors import CheckpointError, UnsupportedModelError

_SIGLIP, _CLIP = "siglip_vision_model", "clip_vision_model"
_CLIP_IN_LLAVA = {  # absent keys, if there is no vision_config at all
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def read_gemma3_vision(fields: JsonFields, out_hidden_size: int) -> VisionConfig:
    """See `hf_vision.read_vision`. SigLIP whose patches are averaged, square by square, to a fixed number of tokens."""
    vision = fields.nested("vision_config")
    if (kind := vision.text("model_type", _SIGLIP)) != _SIGLIP:
        raise UnsupportedModelError(f"{vision.origin}: model_type={kind!r} is not supported; known: {_SIGLIP}")
    tower = _read_tower(vision, out_hidden_size)
    num_tokens = fields.integer("mm_tokens_per_image", 256)
    tokens_per_side = math.isqrt(num_tokens)
    if tokens_per_side**2 != num_tokens or tower["position_grid"] % tokens_per_side:
        side = tower["position_grid"]
        raise fields.fail("mm_tokens_per_image", f"a square is expected whose side divides {side} patches")
    if "boi_token_index" in fields.nulls or "eoi_token_index" in fields.nulls:
        raise CheckpointError(f"{fields.origin}: boi_token_index and eoi_token_index are expected")
    return VisionConfig(
        spatial_merge_size=tower["position_grid"] // tokens_per_side,
        is_bidirectional=True,
        image_token_id=_token(fields, "image_token", 262144),
        vision_start_token_id=_token(fields, "boi_token", 255999),
        vision_end_token_id=_token(fields, "eoi_token", 256000),
        text_around="\n\n",
        **tower,
    )


def read_llava_vision(fields: JsonFields, out_hidden_size: int) -> VisionConfig:
    """See `hf_vision.read_vision`. CLIP or SigLIP, one token a patch, from one of its last layers or several."""
    vision = fields.nested("vision_config")
    if not vision.values:
        vision = JsonFields(vision.origin, {"model_type": _CLIP, **_CLIP_IN_LLAVA})
    kind = vision.text("model_type", _CLIP)
    if kind not in (_CLIP, _SIGLIP):
        raise UnsupportedModelError(f"{vision.origin}: model_type={kind!r} is not supported; known: {_CLIP}, {_SIGLIP}")
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.fail("vision_feature_select_strategy", "default or full is expected")
    if kind == _SIGLIP and strategy == "default":
        why = "drops the first patch of a tower without class token; only 'full' is supported"
        raise UnsupportedModelError(f"{fields.origin}: vision_feature_select_strategy={strategy!r} {why}")
    if (activation := fields.text("projector_hidden_act", "gelu")) != "gelu":
        raise UnsupportedModelError(
            f"{fields.origin}: projector_hidden_act={activation!r} is not supported; known: gelu"
        )
    by_strategy: ClassToken = "internal" if strategy == "default" else "output"
    return VisionConfig(
        spatial_merge_size=1,
        class_token=by_strategy if kind == _CLIP else "none",
        feature_depths=_feature_depths(fields, vision.integer("num_hidden_layers", 12)),
        projector_has_bias=fields.flag("multimodal_projector_bias", True),
        image_token_id=_token(fields, "image_token", 32000),
        **_read_tower(vision, out_hidden_size),
    )


def _read_tower(vision: JsonFields, out_hidden_size: int) -> dict[str, Any]:
    """Read what SigLIP and CLIP share."""
    is_clip = vision.text("model_type", _SIGLIP) == _CLIP
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


def _feature_depths(fields: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Return after how many blocks the output is read. `vision_feature_layer` counts from either end; 0: before all."""
    stated = fields.values.get("vision_feature_layer", -2)
    layers = stated if isinstance(stated, list) else [stated]
    if not layers or not all(type(each) is int and -num_layers - 1 <= each <= num_layers for each in layers):
        raise fields.fail("vision_feature_layer", f"numbers from {-num_layers - 1} to {num_layers} are expected")
    return tuple(each if each >= 0 else num_layers + 1 + each for each in layers)


def _token(fields: JsonFields, name: str, default: int) -> int:
    """Return a token's id, under either of the names that files have for it."""
    return fields.integer(f"{name}_index", fields.integer(f"{name}_id", default, minimum=0), minimum=0)
