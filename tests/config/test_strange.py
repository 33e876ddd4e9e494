"""Folders that are no language model of a known family: what they are is said, and what can be done."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.hf import read_model_config
from octavo.errors import CheckpointError, UnsupportedModelError, UserError

_ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}


@pytest.mark.parametrize(
    ("file", "settings", "error", "says"),
    [
        ("config.json", {"_class_name": "UNet2DConditionModel"}, UnsupportedModelError, "of a pipeline of diffusers"),
        (
            "config.json",
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
            UnsupportedModelError,
            "has an encoder and a decoder",
        ),
        (
            "config.json",
            {"architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": {"AutoConfig": "x.FooConfig"}},
            UnsupportedModelError,
            "code comes with it, which Octavo never runs.* 'foo'",
        ),
        (
            "config.json",
            {"architectures": ["CLIPModel"], "model_type": "clip"},
            UnsupportedModelError,
            "docs/models.md",
        ),
        ("adapter_config.json", _ADAPTER, CheckpointError, "an adapter, no model: load some/base"),
    ],
)
def test_what_it_is_and_the_way_out(
    file: str, settings: dict[str, Any], error: type[UserError], says: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(error, match=says):
        read_model_config(tmp_path, model="m")
