"""What single families read from `config.json`, where no other test compares it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import TINY_MODELS
from tools.families_table import PAGE, with_table

from octavo.config.families import FAMILIES
from octavo.config.hf import read_model_config
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.layers.rotary import inverse_frequencies

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 45,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def read(folder: Path, config: dict[str, Any], **options: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder, model="m", **options)


def test_mistral_behind_pixtral(tmp_path: Path) -> None:
    """The text model's settings count; the tower's tensors are left out."""
    text = {**TEXT, "model_type": "mistral", "head_dim": 24, "rope_theta": 1e9, "sliding_window": None}
    name = "Mistral3ForConditionalGeneration"
    config = read(tmp_path, {"architectures": [name], "text_config": text, "vision_config": {"hidden_size": 8}})
    assert (config.attention(0).head_dim, config.rotary[0].rope.theta, config.vision) == (24, 1e9, None)
    assert all(part.endswith(".") for part in FAMILIES[name].left_out)


def long_rope(folder: Path, **changes: Any) -> dict[str, Any]:
    [case] = [case for case in TINY_MODELS if case.name == "phi3-long"]
    case.save(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {**config, "rope_parameters": {**config["rope_parameters"], **changes}}


def test_longrope_is_chosen_by_the_length_that_is_served(tmp_path: Path) -> None:
    config = long_rope(tmp_path)
    long, short = (read(tmp_path, config, max_model_len=length).rotary[0] for length in (64, 16))
    assert long == short, "the configuration has both"
    assert (long.width, long.rope.divisors, long.rope.long_divisors) == (4, (1.0, 1.1), (1.5, 4.0))
    assert long.rope.original_max_position == 16
    assert inverse_frequencies(long.rope, 4)[1] == pytest.approx(1.5**0.5)  # 1 + ln 4 / ln 16


def test_lists_of_divisors_are_as_long_as_they_should_be(tmp_path: Path) -> None:
    config = long_rope(tmp_path, short_factor=[1.0])
    with pytest.raises(CheckpointError, match=r"short_factor=\[1.0\]: a list of 2 numbers is expected"):
        read(tmp_path, config)
    with pytest.raises(
        UnsupportedModelError,
        match=r"partial_rotary_factor=0.1 is not supported: an even number of a head's 8 elements",
    ):
        read(tmp_path, long_rope(tmp_path, partial_rotary_factor=0.1))


def test_layers_that_do_not_rotate(tmp_path: Path) -> None:
    smollm3 = read(tmp_path, {"architectures": ["SmolLM3ForCausalLM"], **TEXT})
    assert [spec.rotary for spec in smollm3.attending] == [0, 0, 0, None]
    listed = read(tmp_path, {"architectures": ["SmolLM3ForCausalLM"], **TEXT, "no_rope_layers": [0, 1, 1, 0]})
    assert [spec.rotary for spec in listed.attending] == [None, 0, 0, None]
    with pytest.raises(CheckpointError, match=r"no_rope_layers=\[1\]: 4 entries are expected"):
        read(tmp_path, {"architectures": ["SmolLM3ForCausalLM"], **TEXT, "no_rope_layers": [1]})
    windows = {"architectures": ["Exaone4ForCausalLM"], **TEXT, "sliding_window": 8}
    exaone = read(tmp_path, {**windows, "sliding_window_pattern": "LLG"})
    assert exaone.sliding_windows == (8, 8, None, 8)
    assert [spec.rotary for spec in exaone.attending] == [0, 0, None, 0]
    whole = read(tmp_path, {**windows, "sliding_window": None})
    assert [(spec.rotary, spec.sliding_window) for spec in whole.attending] == [(0, None)] * 4


def test_the_table_of_families_is_that_of_the_registry() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run python -m tools.families_table --write"
    assert all(f"`{name}`" in page for name in FAMILIES)
