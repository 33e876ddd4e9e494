"""What an absent key means is what transformers takes it to mean, for every architecture."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from octavo.config.families import FAMILIES
from octavo.config.hf import read_model_config
from octavo.errors import UnsupportedModelError

# All that Octavo insists on. 32 heads suit every default number of kv heads.
LEAST = {
    "vocab_size": 97,
    "hidden_size": 128,
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
ONE_ROTATION = [CHANGES[2], CHANGES[4]]
WINDOWS = [{"sliding_window": None}, {"use_sliding_window": True}, {"use_sliding_window": True, "sliding_window": 9}]


# Others have tests of their own.
BY_FACTS = [name for name, of in FAMILIES.items() if not (of.read_tower or of.read_layers or of.is_nested)]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("architecture", BY_FACTS)
def test_settings(architecture: str, change: dict[str, object], tmp_path: Path) -> None:
    config = {**LEAST, "architectures": [architecture], "model_type": FAMILIES[architecture].model_type, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if FAMILIES[architecture].local_rope_theta is not None and change in ONE_ROTATION:
        pytest.skip("transformers ignores these settings where layers rotate in two ways")
    ours, theirs = read_model_config(tmp_path, model="least"), AutoConfig.from_pretrained(tmp_path)
    assert ours.attention(0).num_kv_heads == (theirs.num_key_value_heads or theirs.num_attention_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.attention(0).head_dim == head_dim
    assert ours.rms_norm_eps == (theirs.norm_eps if hasattr(theirs, "norm_eps") else theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)  # of kinds of layers, in some
    assert (ours.rotary[0].rope.theta, ours.rotary[0].rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert ours.rotary[0].rope.original_max_position == rope.get(
        "original_max_position_embeddings", ours.rotary[0].rope.original_max_position
    )


GEMMA = {**LEAST, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


def test_layers_with_a_window_rotate_by_settings_of_their_own(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, object], tuple[float, float]]] = [
        ({"rope_theta": 5e5, "rope_local_base_freq": 500.0}, (5e5, 500.0)),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}}, (1e6, 7.0)),
    ]
    for change, thetas in cases:
        (tmp_path / "config.json").write_text(json.dumps({**GEMMA, **change}))
        config = read_model_config(tmp_path, model="gemma")
        assert (config.rotary[0].rope.theta, config.rotary[1].rope.theta) == thetas


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        (
            {"rope_parameters": {"rope_theta": 300.0}},
            UnsupportedModelError,
            "rope_theta=300.0 is not supported: settings under full_attention",
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, UnsupportedModelError, "rope_type='yarn'"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "attn_logit_softcapping=50.0"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention=True"),
        ({"hidden_activation": "gelu"}, UnsupportedModelError, "hidden_activation='gelu'"),
    ],
)
def test_settings_that_would_change_the_result_are_refused(
    change: dict[str, object], error: type[Exception], names: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, **change}))
    with pytest.raises(error, match=names):
        read_model_config(tmp_path, model="gemma")


def test_a_scaled_length_is_not_scaled_again(tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, **scaling}))
    assert read_model_config(tmp_path, model="gemma").max_model_len == LEAST["max_position_embeddings"]


@pytest.mark.parametrize("change", [{}, *WINDOWS], ids=str)
@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "Gemma3"])
def test_windows(family: str, change: dict[str, object], tmp_path: Path) -> None:
    architecture = f"{family}ForCausalLM"
    config = {**LEAST, "architectures": [architecture], "model_type": FAMILIES[architecture].model_type, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 30)
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert read_model_config(tmp_path, model="least").sliding_windows == windows
