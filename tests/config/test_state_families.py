"""LFM2 and Granite 4: what files leave out, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.hf import read_model_config
from octavo.config.layers import DenseSpec, ExpertsSpec, Mamba2Spec, ShortConvSpec
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, UnsupportedModelError

LFM2: dict[str, Any] = {"architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 4}
MOE: dict[str, Any] = {"architectures": ["Lfm2MoeForCausalLM"], "num_hidden_layers": 4}
GRANITE: dict[str, Any] = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 2}


def read(tmp_path: Path, config: dict[str, Any], **settings: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    return read_model_config(tmp_path, model="m")


def test_lfm2(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2, full_attn_idxs=[1, 3], conv_L_cache=3)
    assert config.recurrent_layers == (0, 2)
    conv = config.layers[0].mixer
    assert conv == ShortConvSpec(num_channels=2560, conv_size=3)
    assert (conv.conv_shape, conv.matrix_shape, conv.input_size) == ((2, 2560), None, 2560)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.rotary[0].rope.theta) == (1e-5, True, 1e6)
    assert config.attention(1).head_norms == "each"


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"intermediate_size": 100, "block_multiple_of": 8}, 72),
        ({"intermediate_size": 5, "block_ff_dim": 100, "block_multiple_of": 8}, 72),
        ({"intermediate_size": 100, "block_ffn_dim_multiplier": None}, 66),
        ({"intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
        ({}, 8192),
    ],
)
def test_sizes_of_mlps(tmp_path: Path, settings: dict[str, Any], size: int) -> None:
    assert read(tmp_path, LFM2, **settings).dense == DenseSpec(intermediate_size=size)


def test_lfm2_with_experts(tmp_path: Path) -> None:
    """In the first layers there is an MLP, of the size that is stated."""
    kinds = ["conv", "full_attention", "conv", "conv"]
    config = read(tmp_path, MOE, layer_types=kinds, intermediate_size=100, norm_eps=1e-4, tie_embedding=False)
    assert [isinstance(layer.feed_forward, ExpertsSpec) for layer in config.layers] == [False, False, True, True]
    assert config.dense == DenseSpec(intermediate_size=100)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-4, False)
    assert config.experts is not None
    assert (config.experts.routing.scores, config.experts.routing.epsilon) == ("sigmoid", 1e-6)


def test_granite(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE, layer_types=["linear_attention", "full_attention"])
    mamba = config.layers[0].mixer
    assert mamba == Mamba2Spec(num_groups=1, num_heads=128, state_size=256, head_dim=64, conv_size=4)
    assert (mamba.conv_shape, mamba.matrix_shape) == ((3, 8704), (128, 256, 64))
    assert (config.attention(1).rotary, config.attention(1).scale, config.rotary) == (None, 1.0, ())
    for limit in ("[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]'):
        (tmp_path / "config.json").write_text(json.dumps(GRANITE)[:-1] + f', "time_step_limit": {limit}}}')
        assert read_model_config(tmp_path, model="m").layers[0].mixer == mamba


@pytest.mark.parametrize(
    ("config", "settings", "error", "match"),
    [
        (LFM2, {"layer_types": ["conv"]}, CheckpointError, "layer_types: 4 entries are expected, found 1"),
        (LFM2, {"layer_types": ["conv"] * 4}, UnsupportedModelError, "one layer with full_attention"),
        (LFM2, {"layer_types": ["mamba"] * 4}, UnsupportedModelError, "'mamba' is not supported"),
        (LFM2, {"full_attn_idxs": [4]}, CheckpointError, r"full_attn_idxs=\[4\]: numbers of layers below"),
        (LFM2, {"conv_L_cache": 10}, UnsupportedModelError, "conv_L_cache=10 is not supported; 2 to 9 are"),
        (LFM2, {"conv_L_cache": 1}, CheckpointError, "conv_L_cache=1: at least 2 is expected"),
        (MOE, {"num_experts": 3}, CheckpointError, r"num_experts_per_tok=4: at most as many .* \(3\)"),
        (GRANITE, {"layer_types": ["mamba", "conv"]}, UnsupportedModelError, "layer_types: 'conv' is not supported"),
        (GRANITE, {"mamba_n_heads": 100}, CheckpointError, r"mamba_n_heads=100: a divisor of .* \(8192\)"),
        (GRANITE, {"mamba_d_head": 32}, CheckpointError, r"mamba_d_head=32: .* \(64\) is expected"),
        (GRANITE, {"mamba_n_groups": 3}, CheckpointError, r"a multiple of mamba_n_groups \(3\) is expected"),
        (GRANITE, {"position_embedding_type": "alibi"}, UnsupportedModelError, "'alibi' is not supported"),
        (GRANITE, {"time_step_limit": [0.5, 0.1]}, CheckpointError, "a bound of at least 0"),
        (GRANITE, {"time_step_limit": [0.5, "x"]}, CheckpointError, "two numbers are expected"),
        (GRANITE, {"num_local_experts": 1, "num_experts_per_tok": 2}, CheckpointError, "at most as many"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        read(tmp_path, config, **settings)
