"""Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923), Qwen3-VL (arXiv:2511.21631).

Rotary positions count time, height and width.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.config.family import DECODER_NAMES, HEAD_NORM_NAMES, Family
from octavo.config.hf_images import read_activation
from octavo.config.json_fields import JsonFields
from octavo.config.model import VisionConfig


def _read_tower(
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
        activation=read_activation(vision, activation),
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


_QWEN2 = Family(
    name="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    model="octavo.models.qwen_vl:Qwen2VLForConditionalGeneration",
    read_tower=partial(
        _read_tower,
        activation="quick_gelu",
        default_sizes={"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16},
    ),
    num_kv_heads=8,
    window_rule="upper_layers",
    qkv_bias=True,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    defaults={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "max_position_embeddings": 32768,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    has_rotary_axes=True,
    rotary_sections=(16, 24, 24),
)
FAMILIES = (
    _QWEN2,
    replace(
        _QWEN2,
        name="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        model="octavo.models.qwen_vl:Qwen2_5_VLForConditionalGeneration",
        read_tower=partial(
            _read_tower,
            activation="silu",
            default_sizes={"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16},
            has_windows=True,
        ),
    ),
    Family(
        name="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        model="octavo.models.qwen_vl:Qwen3VLForConditionalGeneration",
        weight_names={**DECODER_NAMES, **HEAD_NORM_NAMES},
        read_tower=partial(
            _read_tower,
            activation="gelu_pytorch_tanh",
            default_sizes={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
            patch_size=16,
            has_learned_positions=True,
        ),
        num_kv_heads=32,
        head_dim=128,
        head_norms="each",
        rope_theta=5e5,
        defaults={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 128000,
        },
        has_rotary_axes=True,
        rotary_sections=(24, 20, 20),
        interleaves_axes=True,
    ),
)
