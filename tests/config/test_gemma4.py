"""Gemma 4's configuration: as published, and as transformers writes it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.models.paged import PagedRunner, load
from tests.models.tiny import TINY_MODELS

from octavo.config.hf import read_model_config
from octavo.config.layers import DenseSpec, ExpertsSpec
from octavo.config.model import ModelConfig, TokenInputs
from octavo.errors import CheckpointError, UnsupportedModelError

PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 8,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {"model_type": "gemma4_vision"},
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    config = {**PUBLISHED, "text_config": {**PUBLISHED["text_config"], **changes}}
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder, model="gemma4")


def test_layers_of_two_kinds(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.sliding_windows == (8,) * 5 + (None,) * 2  # every sixth, and always the last
    near, far = config.attention(0), config.attention(5)
    assert (near.head_dim, near.num_kv_heads, near.projects, near.scale) == (16, 2, "qkv", 1.0)
    assert (far.head_dim, far.num_kv_heads, far.projects, far.has_value_norm) == (32, 1, "qk", True)
    assert len(config.kv_groups) == 2
    full, local = config.rotary
    assert (full.width, full.rope.theta, full.rope.divisors) == (32, 1e6, (1.0,) * 4 + (math.inf,) * 12)
    assert (local.width, local.rope.theta, local.rope.divisors) == (16, 1e4, ())
    assert (config.logits_soft_cap, config.token_inputs, config.vision) == (30.0, None, None)


def test_what_layers_share(tmp_path: Path) -> None:
    options = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": False}
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = read(tmp_path, num_hidden_layers=7, layer_types=[*types, "sliding_attention", *types[:2]], **options)
    assert [spec.shares_kv_of for spec in config.attending] == [None] * 4 + [2, 2, 3]
    sizes = [of.feed_forward.intermediate_size for of in config.layers if isinstance(of.feed_forward, DenseSpec)]
    assert sizes == [40] * 4 + [80] * 3
    with pytest.raises(CheckpointError, match=r"num_kv_shared_layers=3: a layer of each kind"):
        read(tmp_path, num_kv_shared_layers=3, layer_types=["sliding_attention"] * 6 + ["full_attention"])


def test_inputs_of_layers_and_experts(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20}
    config = read(tmp_path, hidden_size_per_layer_input=12, vocab_size_per_layer_input=90, **experts)
    assert config.token_inputs == TokenInputs(vocab_size=90, size=12)
    assert config.layers[0].feed_forward == ExpertsSpec(
        num_experts=4, top_k=2, intermediate_size=20, renormalizes=True, beside=DenseSpec(intermediate_size=40)
    )


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention='all' is not supported"):
        read(tmp_path, use_bidirectional_attention="all")


def test_a_published_checkpoint_has_towers_and_weights_that_are_not_read(tmp_path: Path) -> None:
    """Names under language_model, a tower, and keys and values of layers that read another layer's."""
    case = next(case for case in TINY_MODELS if case.name == "gemma4-shared")
    case.save(tmp_path)
    tokens = {0: list(range(3, 20))}
    [expected] = PagedRunner(load(tmp_path)).step(tokens)
    text = json.loads((tmp_path / "config.json").read_text())
    nested = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    tensors = load_file(tmp_path / "model.safetensors")
    published = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    some = tensors["model.norm.weight"].clone()
    published["model.vision_tower.patch_embedder.input_proj.weight"] = some
    published["model.embed_vision.embedding_projection.weight"] = some.clone()
    published["model.language_model.layers.3.self_attn.k_norm.weight"] = some.clone()
    published["model.language_model.layers.3.self_attn.v_proj.weight"] = some.clone()
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    [found] = PagedRunner(load(tmp_path)).step(tokens)
    assert found.equal(expected)
