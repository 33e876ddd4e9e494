"""Vision towers: absent keys mean what transformers takes them to mean, and what would change the result is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from octavo.config.families import FAMILIES
from octavo.config.hf import read_model_config
from octavo.config.layers import DenseSpec
from octavo.errors import CheckpointError, UnsupportedModelError

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 45,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,  # which suit every default number of kv heads
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1]},
}
SIZES = {"Qwen2VLForConditionalGeneration": "hidden_size"}
NAMES = [name for name, facts in FAMILIES.items() if facts.has_rotary_axes]


def save(folder: Path, architecture: str, vision: dict[str, Any], *, flat: bool = False, **others: Any) -> None:
    text = TEXT if flat else {"text_config": TEXT}
    vision = {SIZES.get(architecture, "out_hidden_size"): 64, **vision}
    kind = FAMILIES[architecture].model_type
    config = {"architectures": [architecture], "model_type": kind, "vision_config": vision, **text, **others}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", NAMES)
def test_absent_keys(architecture: str, tmp_path: Path) -> None:
    save(tmp_path, architecture, {})
    ours, theirs = read_model_config(tmp_path, model="least"), AutoConfig.from_pretrained(tmp_path)
    text, vision = theirs.text_config, theirs.vision_config
    assert (ours.attention(0).num_kv_heads, ours.rms_norm_eps, ours.rotary[0].rope.theta) == (
        text.num_key_value_heads,
        text.rms_norm_eps,
        text.rope_parameters["rope_theta"],
    )
    assert ours.vision is not None
    assert (ours.vision.num_layers, ours.vision.num_heads) == (vision.depth, vision.num_heads)
    assert ours.vision.hidden_size == getattr(vision, "embed_dim", vision.hidden_size)
    inner = getattr(vision, "intermediate_size", None) or vision.embed_dim * vision.mlp_ratio
    assert ours.vision.intermediate_size == inner
    for name in ("patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels"):
        assert getattr(ours.vision, name) == getattr(vision, name), name
    assert ours.vision.full_layers == tuple(getattr(vision, "fullatt_block_indexes", ()))
    assert ours.vision.deepstack_layers == tuple(getattr(vision, "deepstack_visual_indexes", ()))
    assert (ours.vision.position_grid or 0) ** 2 == getattr(vision, "num_position_embeddings", 0)
    assert ours.vision.image_token_id == theirs.image_token_id
    assert ours.vision.rope_theta == vision.rope_parameters["rope_theta"]


def test_older_files_have_the_text_beside_the_rest_and_name_their_rotary_type(tmp_path: Path) -> None:
    rope = {"rope_parameters": None, "rope_theta": 1e5, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}
    save(tmp_path, NAMES[0], {}, flat=True, tie_word_embeddings=True, **rope)
    config = read_model_config(tmp_path, model="older")
    assert (config.rotary[0].rope.theta, config.rotary[0].rope.kind, config.rotary[0].rope.sections) == (
        1e5,
        "default",
        (1, 2, 1),
    )
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("vision", "error", "names"),
    [
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act='relu'"),
        ({"hidden_size": 65}, CheckpointError, "hidden_size=65: the language model's"),
        ({"num_heads": 7}, CheckpointError, "num_heads=7"),
        ({"depth": 0}, CheckpointError, "depth=0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, UnsupportedModelError, "rope_type='yarn'"),
    ],
)
def test_what_would_change_the_result_is_refused(
    vision: dict[str, Any], error: type[Exception], names: str, tmp_path: Path
) -> None:
    save(tmp_path, "Qwen2VLForConditionalGeneration", vision)
    with pytest.raises(error, match=names):
        read_model_config(tmp_path, model="strange")


def test_sections_must_cover_the_head(tmp_path: Path) -> None:
    save(tmp_path, NAMES[0], {}, flat=True, rope_parameters={"mrope_section": [1, 1, 1]})
    with pytest.raises(
        CheckpointError, match=r"mrope_section=\[1, 1, 1\]: three numbers are expected that add up to 4"
    ):
        read_model_config(tmp_path, model="strange")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *((name, None) for name, family in FAMILIES.items() if family.read_tower is not None),
        *(("LlavaForConditionalGeneration", kind) for kind in ("mistral", "qwen2")),
    ],
)
def test_a_nested_model_leaves_out_what_is_its_familys_default(
    architecture: str, kind: str | None, tmp_path: Path
) -> None:
    facts, text = FAMILIES[architecture], {} if kind is None else {"model_type": kind}
    config = {"architectures": [architecture], "model_type": facts.model_type, "text_config": text}
    theirs = AutoConfig.for_model(facts.model_type, text_config=dict(text)).get_text_config()
    vision = AutoConfig.for_model(facts.model_type).vision_config.to_dict()
    if "out_hidden_size" in vision or architecture in SIZES:
        vision[SIZES.get(architecture, "out_hidden_size")] = theirs.hidden_size
    if architecture.startswith("Gemma3"):
        vision |= {"image_size": 896, "patch_size": 14}  # transformers' own defaults do not go together
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": vision}))
    ours = read_model_config(tmp_path, model="least")
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.attention(0).num_heads == theirs.num_attention_heads
    assert ours.dense == DenseSpec(intermediate_size=theirs.intermediate_size)
    for name in ("vocab_size", "hidden_size", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.attention(0).num_kv_heads == theirs.num_key_value_heads
    assert ours.rotary[0].rope.is_interleaved == (architecture == "Qwen3VLForConditionalGeneration")
