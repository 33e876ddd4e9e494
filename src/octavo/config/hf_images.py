"""Reads models that take images from `config.json`: the vision tower, and the keys of the language model.

Gemma 3 and LLaVA have plain vision transformers, SigLIP and CLIP; Qwen2-VL and its successors have their own.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from octavo.config.architectures import ARCHITECTURES, ArchitectureFacts
from octavo.config.json_fields import JsonFields
from octavo.config.model import ClassToken, VisionActivation, VisionConfig
from octavo.errors import CheckpointError, UnsupportedModelError

_ACTIVATIONS: dict[str, VisionActivation] = {
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
_SIGLIP, _CLIP = "siglip_vision_model", "clip_vision_model"
_CLIP_IN_LLAVA = {  # absent keys, if there is no vision_config at all
    "model_type": _CLIP,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def text_part(fields: JsonFields, facts: ArchitectureFacts) -> tuple[JsonFields, ArchitectureFacts]:
    """Return the language model's keys and the facts about it: the model's own, or those that `text_config` names.

    Its keys are under `text_config`, or in older files next to the others.
    """
    text = fields.nested("text_config")
    values: dict[str, Any] = {**fields.values, **dict.fromkeys(fields.nulls), **text.values}
    values |= dict.fromkeys(text.nulls)
    # Files have it in either place; but where true is the default, `text_config` repeats it unasked.
    is_default = facts.defaults.get("tie_word_embeddings", False)
    ties = (fields,) if is_default else (fields, text)
    values["tie_word_embeddings"] = any(of.flag("tie_word_embeddings", is_default) for of in ties)
    if "final_logit_softcapping" in (part := JsonFields(fields.origin, values)):  # without effect in transformers
        raise part.unsupported("final_logit_softcapping", " with a vision tower")
    if facts.text:
        known = {ARCHITECTURES[name].model_type: name for name in facts.text}
        kind = text.text("model_type", next(iter(known)))
        if kind not in known:
            raise text.unsupported("model_type", f"; known: {', '.join(known)}")
        facts = replace(ARCHITECTURES[known[kind]], defaults=facts.defaults.get(kind, {}))
    return part, facts


def _read_gemma3(fields: JsonFields, out_hidden_size: int) -> VisionConfig:
    """SigLIP whose patches are averaged, square by square, to a fixed number of tokens."""
    vision = fields.nested("vision_config")
    if vision.text("model_type", _SIGLIP) != _SIGLIP:
        raise vision.unsupported("model_type", f"; known: {_SIGLIP}")
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


def _read_llava(fields: JsonFields, out_hidden_size: int) -> VisionConfig:
    """CLIP or SigLIP, one token a patch, from one of its last layers or several."""
    vision = fields.nested("vision_config")
    if not vision.values:
        vision = JsonFields(vision.origin, _CLIP_IN_LLAVA)
    kind = vision.text("model_type", _CLIP)
    if kind not in (_CLIP, _SIGLIP):
        raise vision.unsupported("model_type", f"; known: {_CLIP}, {_SIGLIP}")
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.fail("vision_feature_select_strategy", "default or full is expected")
    if kind == _SIGLIP and strategy == "default":
        why = "drops the first patch of a tower without class token; only 'full' is supported"
        raise UnsupportedModelError(f"{fields.origin}: vision_feature_select_strategy={strategy!r} {why}")
    if fields.text("projector_hidden_act", "gelu") != "gelu":
        raise fields.unsupported("projector_hidden_act", "; known: gelu")
    by_strategy: ClassToken = "internal" if strategy == "default" else "output"
    num_layers = vision.integer("num_hidden_layers", 12)
    stated = fields.values.get("vision_feature_layer", -2)  # counted from either end; 0: before all
    layers = stated if isinstance(stated, list) else [stated]
    if not layers or not all(type(each) is int and -num_layers - 1 <= each <= num_layers for each in layers):
        raise fields.fail("vision_feature_layer", f"numbers from {-num_layers - 1} to {num_layers} are expected")
    return VisionConfig(
        spatial_merge_size=1,
        class_token=by_strategy if kind == _CLIP else "none",
        feature_depths=tuple(each if each >= 0 else num_layers + 1 + each for each in layers),
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
        "activation": _activation(vision, "quick_gelu" if is_clip else "gelu_pytorch_tanh"),
        "norm_eps": vision.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
    }


def _read_qwen(
    fields: JsonFields,
    out_hidden_size: int,
    *,
    activation: str,
    default_sizes: dict[str, int],
    patch_size: int = 14,
    has_windows: bool = False,
    has_learned_positions: bool = False,
) -> VisionConfig:
    """The keyword arguments are what the generations differ in: values of absent keys, and kinds of layers.

    With learned positions go layers whose output later ones of the decoder get (deepstack), and videos by frame.
    """
    vision = fields.nested("vision_config")
    sizes = {key: vision.integer(key, default) for key, default in default_sizes.items()}
    is_first = "embed_dim" in sizes
    hidden_size = sizes["embed_dim" if is_first else "hidden_size"]
    stated_key = "hidden_size" if is_first else "out_hidden_size"
    if vision.integer(stated_key, out_hidden_size) != out_hidden_size:
        raise vision.fail(stated_key, f"the language model's hidden_size ({out_hidden_size}) is expected")
    head_dim, remainder = divmod(hidden_size, sizes["num_heads"])
    if remainder or head_dim % 4:
        raise vision.fail("num_heads", f"heads of a multiple of 4 of {hidden_size} elements are expected")
    rope = vision.nested("rope_parameters")
    if rope.text("rope_type", "axial") != "axial":
        raise rope.unsupported("rope_type")
    position_grid = None
    if has_learned_positions:
        num_positions = vision.integer("num_position_embeddings", 2304)
        position_grid = math.isqrt(num_positions)
        if position_grid**2 != num_positions:
            raise vision.fail("num_position_embeddings", "a square is expected")
    tokens: dict[str, Any] = {
        f"{name}_token_id": fields.integer(f"{name}_token_id", default, minimum=0)
        for name, default in zip(
            ("vision_start", "vision_end", "image", "video"), (151652, 151653, 151655, 151656), strict=True
        )
    }
    return VisionConfig(
        num_layers=sizes["depth"],
        hidden_size=hidden_size,
        intermediate_size=sizes.get("intermediate_size", hidden_size * sizes.get("mlp_ratio", 0)),
        num_heads=sizes["num_heads"],
        out_hidden_size=out_hidden_size,
        in_channels=vision.integer("in_channels", vision.integer("in_chans", 3)),
        patch_size=vision.integer("patch_size", vision.integer("spatial_patch_size", patch_size)),
        temporal_patch_size=vision.integer("temporal_patch_size", 2),
        spatial_merge_size=vision.integer("spatial_merge_size", 2),
        activation=_activation(vision, activation),
        rope_theta=rope.number("rope_theta", 10000.0),
        window_size=vision.integer("window_size", 112) if has_windows else None,
        full_layers=_layers(vision, "fullatt_block_indexes", (7, 15, 23, 31)) if has_windows else (),
        position_grid=position_grid,
        deepstack_layers=_layers(vision, "deepstack_visual_indexes", (8, 16, 24)) if position_grid else (),
        has_rotary_axes=True,
        has_frame_times=has_learned_positions,
        tokens_per_second=vision.number("tokens_per_second", 4) if has_windows else None,
        **tokens,
    )


def _layers(vision: JsonFields, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(vision.integers(key)) if key in vision else default


def _activation(vision: JsonFields, default: str) -> VisionActivation:
    name = vision.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        raise vision.unsupported("hidden_act", f"; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _token(fields: JsonFields, name: str, default: int) -> int:
    """Return a token's id, under either of the names that files have for it."""
    return fields.integer(f"{name}_index", fields.integer(f"{name}_id", default, minimum=0), minimum=0)


# By architecture: what reads the tower from the keys of `config.json` and the language model's hidden size.
TOWER_READERS: MappingProxyType[str, Callable[[JsonFields, int], VisionConfig]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": _read_gemma3,
        "LlavaForConditionalGeneration": _read_llava,
        "Qwen2VLForConditionalGeneration": partial(
            _read_qwen,
            activation="quick_gelu",
            default_sizes={"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16},
        ),
        "Qwen2_5_VLForConditionalGeneration": partial(
            _read_qwen,
            activation="silu",
            default_sizes={"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16},
            has_windows=True,
        ),
        "Qwen3VLForConditionalGeneration": partial(
            _read_qwen,
            activation="gelu_pytorch_tanh",
            default_sizes={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
            patch_size=16,
            has_learned_positions=True,
        ),
    }
)
