"""Qwen3.5 and Qwen3-Next: what published files say, what they leave out, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.hf import read_model_config
from octavo.config.layers import AttentionSpec, DenseSpec, ExpertsSpec, GatedDeltaSpec
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, UnsupportedModelError

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def read(tmp_path: Path, **settings: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **settings}))
    return read_model_config(tmp_path, model="m")


def test_what_files_leave_out_is_that_of_the_published_models(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.recurrent_layers == (0, 1, 2, 4, 5, 6)
    linear = config.layers[0].mixer
    assert linear == GatedDeltaSpec(num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, conv_size=4)
    assert linear.conv_shape == (3, 8192)
    assert linear.matrix_shape == (32, 128, 128)
    full = config.layers[3].mixer
    assert isinstance(full, AttentionSpec)
    assert full.gate == "elements_by_query"
    assert full.head_norms == "each"
    assert full.head_dim == 256
    assert [table.width for table in config.rotary] == [64]
    assert config.norm_offset == 1.0
    assert [group.kind for group in config.kv_groups] == ["attention", "recurrent"]


def test_rotary_settings_of_three_axes_are_those_of_a_text(tmp_path: Path) -> None:
    axes = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    for name in ("default", "mrope"):
        rope = {**axes, "rope_type": name, "rope_theta": 1e7, "partial_rotary_factor": 0.5}
        [table] = read(tmp_path, rope_parameters=rope).rotary
        assert (table.rope.theta, table.width, table.rope.kind) == (1e7, 128, "default")
    [table] = read(tmp_path, rope_theta=500.0, partial_rotary_factor=1.0).rotary
    assert (table.rope.theta, table.width) == (500.0, 256)


@pytest.mark.parametrize(
    ("name", "text_type", "kind"),
    [
        ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", DenseSpec),
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", ExpertsSpec),
    ],
)
def test_the_language_model_of_one_with_a_tower(tmp_path: Path, name: str, text_type: str, kind: type) -> None:
    text = {key: value for key, value in SMALL.items() if key != "architectures"}
    text |= {"model_type": text_type, "layer_types": ["linear_attention"] * 7 + ["full_attention"]}
    whole = {"architectures": [name], "text_config": text, "vision_config": {"model_type": "qwen3_5"}}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": True}))
    config = read_model_config(tmp_path, model="m")
    assert config.recurrent_layers == tuple(range(7))
    assert config.tie_word_embeddings
    assert config.vision is None
    assert isinstance(config.layers[0].feed_forward, kind)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"layer_types": ["linear_attention"]}, CheckpointError, "layer_types: 8 entries are expected, found 1"),
        ({"layer_types": ["linear_attention"] * 8}, UnsupportedModelError, "one layer with full_attention"),
        ({"layer_types": ["mamba"] * 8}, UnsupportedModelError, "'mamba' is not supported"),
        ({"linear_num_key_heads": 5}, CheckpointError, "linear_num_value_heads=None: a multiple"),
        ({"linear_conv_kernel_dim": 10}, UnsupportedModelError, "linear_conv_kernel_dim=10 is not supported; 2 to 9"),
        ({"partial_rotary_factor": 0.1}, UnsupportedModelError, "an even number of a head's 256 elements"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, UnsupportedModelError, "partial_rotary_factor=1.5"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        read(tmp_path, **settings)
