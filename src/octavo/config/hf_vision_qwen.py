"""Reads the vision towers of Qwen2-VL and its successors from `config.json`, with the defaults of each family."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from octavo.config.hf_vision_activation import read_activation
from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig, VisionFamily
from octavo.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Defaults:
    """Values of absent keys; of all keys that a family has."""

    activation: str
    patch_size: int = 14
    sizes: MappingProxyType[str, int]


_FAMILIES: dict[VisionFamily, _Defaults] = {
    "qwen2_vl": _Defaults(
        activation="quick_gelu",
        sizes=MappingProxyType({"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16}),
    ),
    "qwen2_5_vl": _Defaults(
        activation="silu",
        sizes=MappingProxyType({"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16}),
    ),
    "qwen3_vl": _Defaults(
        activation="gelu_pytorch_tanh",
        patch_size=16,
        sizes=MappingProxyType({"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}),
    ),
}
_TOKENS = MappingProxyType(
    {
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }
)


def read_qwen_vision(fields: JsonFields, out_hidden_size: int, *, family: VisionFamily) -> VisionConfig:
    """See `hf_vision.read_vision`."""
    vision, defaults = fields.nested("vision_config"), _FAMILIES[family]
    sizes = {key: vision.integer(key, default) for key, default in defaults.sizes.items()}
    hidden_size = sizes["embed_dim" if family == "qwen2_vl" else "hidden_size"]
    stated_key = "hidden_size" if family == "qwen2_vl" else "out_hidden_size"
    if vision.integer(stated_key, out_hidden_size) != out_hidden_size:
        raise vision.fail(stated_key, f"the language model's hidden_size ({out_hidden_size}) is expected")
    head_dim, remainder = divmod(hidden_size, sizes["num_heads"])
    if remainder or head_dim % 4:
        raise vision.fail("num_heads", f"heads of a multiple of 4 of {hidden_size} elements are expected")
    rope = vision.nested("rope_parameters")
    if rope.text("rope_type", "axial") != "axial":
        raise UnsupportedModelError(f"{rope.origin}: rope_type={rope.values['rope_type']!r} is not supported")
    tokens: dict[str, Any] = {key: fields.integer(key, default, minimum=0) for key, default in _TOKENS.items()}
    has_windows = family == "qwen2_5_vl"
    return VisionConfig(
        num_layers=sizes["depth"],
        hidden_size=hidden_size,
        intermediate_size=sizes.get("intermediate_size", hidden_size * sizes.get("mlp_ratio", 0)),
        num_heads=sizes["num_heads"],
        out_hidden_size=out_hidden_size,
        in_channels=vision.integer("in_channels", vision.integer("in_chans", 3)),
        patch_size=vision.integer("patch_size", vision.integer("spatial_patch_size", defaults.patch_size)),
        temporal_patch_size=vision.integer("temporal_patch_size", 2),
        spatial_merge_size=vision.integer("spatial_merge_size", 2),
        activation=read_activation(vision, defaults.activation),
        rope_theta=rope.number("rope_theta", 10000.0),
        window_size=vision.integer("window_size", 112) if has_windows else None,
        full_layers=_layers(vision, "fullatt_block_indexes", (7, 15, 23, 31)) if has_windows else (),
        position_grid=_position_grid(vision) if family == "qwen3_vl" else None,
        deepstack_layers=_layers(vision, "deepstack_visual_indexes", (8, 16, 24)) if family == "qwen3_vl" else (),
        has_rotary_axes=True,
        has_frame_times=family == "qwen3_vl",
        tokens_per_second=vision.number("tokens_per_second", 4) if has_windows else None,
        **tokens,
    )


def _layers(vision: JsonFields, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(vision.integers(key)) if key in vision else default


def _position_grid(vision: JsonFields) -> int:
    num_positions = vision.integer("num_position_embeddings", 2304)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise vision.fail("num_position_embeddings", "a square is expected")
    return side
