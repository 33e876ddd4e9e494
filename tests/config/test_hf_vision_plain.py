"""Towers of Gemma 3 and LLaVA: absent keys mean what transformers takes them to mean, others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from octavo.config.hf import read_model_config
from octavo.config.layers import DenseSpec
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, OctavoError, UnsupportedModelError

GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
CLIP, SIGLIP = {"model_type": "clip_vision_model"}, {"model_type": "siglip_vision_model"}


def read(folder: Path, whole: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(whole))
    return read_model_config(folder, model="tiny")


SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 9,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma": {**GEMMA, "vision_config": {"image_size": 896, "patch_size": 14}},
    "scaled": {**GEMMA, "text_config": {"hidden_size": 2560, **SCALED}, "vision_config": {"image_size": 256}},
    "nothing": LLAVA,
    "llama": {**LLAVA, "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": CLIP},
    "mistral": {
        **LLAVA,
        "text_config": MISTRAL,
        "vision_config": SIGLIP,
        "vision_feature_select_strategy": "full",
    },
}


@pytest.mark.parametrize("whole", WHOLE.values(), ids=WHOLE)
def test_absent_keys(whole: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = read(tmp_path, whole), AutoConfig.from_pretrained(tmp_path)
    text, vision = theirs.text_config, theirs.vision_config
    names = ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings")
    assert [getattr(ours, name) for name in names] == [getattr(text, name) for name in names]
    assert (ours.num_layers, ours.attention(0).num_heads, ours.attention(0).num_kv_heads) == (
        text.num_hidden_layers,
        text.num_attention_heads,
        text.num_key_value_heads,
    )
    assert ours.dense == DenseSpec(intermediate_size=text.intermediate_size)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    tower = ours.vision
    assert tower is not None
    for name in ("hidden_size", "intermediate_size", "image_size", "patch_size"):
        assert getattr(tower, name) == getattr(vision, name), name
    assert (tower.num_layers, tower.num_heads, tower.norm_eps) == (
        vision.num_hidden_layers,
        vision.num_attention_heads,
        vision.layer_norm_eps,
    )
    assert tower.image_token_id == theirs.image_token_index
    assert tower.vision_start_token_id == getattr(theirs, "boi_token_index", None)


@pytest.mark.parametrize(
    ("whole", "error", "names"),
    [
        ({**GEMMA, "mm_tokens_per_image": 10}, CheckpointError, "mm_tokens_per_image=10"),
        ({**GEMMA, "vision_config": CLIP}, UnsupportedModelError, "model_type='clip_vision_model'"),
        ({**GEMMA, "text_config": {"final_logit_softcapping": 30.0}}, UnsupportedModelError, "final_logit_softcapping"),
        (
            {**LLAVA, "text_config": {"model_type": "phi"}},
            UnsupportedModelError,
            "model_type='phi'.*llama, mistral, qwen2",
        ),
        ({**LLAVA, "vision_config": {"model_type": "pixtral"}}, UnsupportedModelError, "model_type='pixtral'"),
        ({**LLAVA, "vision_config": {**CLIP, "hidden_act": "relu"}}, UnsupportedModelError, "hidden_act='relu'"),
        ({**LLAVA, "vision_config": SIGLIP}, UnsupportedModelError, "drops the first patch"),
        ({**LLAVA, "vision_feature_layer": 99}, CheckpointError, "vision_feature_layer=99"),
        ({**LLAVA, "projector_hidden_act": "relu"}, UnsupportedModelError, "projector_hidden_act='relu'"),
    ],
)
def test_what_would_change_the_result_is_refused(
    whole: dict[str, Any], error: type[OctavoError], names: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=names):
        read(tmp_path, whole)
