"""What an absent key means is what transformers takes it to mean, for every architecture."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from octavo.config.architectures import ARCHITECTURES
from octavo.config.hf import read_model_config

# All that Octavo insists on. 32 heads suit every default number of kv heads.
LEAST = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 45,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "max_position_embeddings": 64,
}
CHANGES = [
    {},
    {"rope_theta": 500.0, "tie_word_embeddings": True},
    {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_theta": 300.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
]
WINDOWS = [{"sliding_window": None}, {"use_sliding_window": True}, {"use_sliding_window": True, "sliding_window": 9}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("architecture", [name for name, facts in ARCHITECTURES.items() if facts.vision is None])
def test_settings(architecture: str, change: dict[str, object], tmp_path: Path) -> None:
    config = {**LEAST, "architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, theirs = read_model_config(tmp_path, model="least"), AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = theirs.rope_parameters
    assert (ours.rope.theta, ours.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert ours.rope.original_max_position == rope.get(
        "original_max_position_embeddings", ours.rope.original_max_position
    )


@pytest.mark.parametrize("change", [{}, *WINDOWS], ids=str)
@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows(architecture: str, change: dict[str, object], tmp_path: Path) -> None:
    config = {**LEAST, "architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 30)
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert read_model_config(tmp_path, model="least").sliding_windows == windows
