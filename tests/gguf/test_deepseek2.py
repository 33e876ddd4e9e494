"""GGUF files of models with latent attention: the logits and settings of the same weights in safetensors."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.gguf.deepseek2 import write_deepseek2
from tests.gguf.files import round_matrices
from tests.gguf.test_models import logits_of
from tests.models.tiny import TINY_MODELS, TinyModel

from octavo.config.hf import read_model_config
from octavo.config.layers import ExpertsSpec
from octavo.kernels.dispatch import native_kernels

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
    "mscale": 1.1,
    "mscale_all_dim": 1.1,
}
# Whole blocks of 32 in rows of every matrix.
EVEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "moe_intermediate_size": 32,
}


def tiny(name: str, **settings: Any) -> TinyModel:
    [case] = [case for case in TINY_MODELS if case.name == name]
    return TinyModel(name=name, family=case.family, settings={**case.settings, **settings})


CASES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek-v2", {"routed_scaling_factor": 1.0}),
    ("deepseek-v2-groups-biases", {"attention_bias": False}),
    ("deepseek-v3", {"rope_parameters": YARN}),
    ("deepseek-v3", {"norm_topk_prob": False, "q_lora_rank": None}),
]


@pytest.mark.parametrize(
    ("case", "is_new"), pick([(0, False), (1, True), (2, False), (3, True)], list(product(range(4), (False, True))))
)
def test_floats_give_the_logits_of_safetensors(case: int, is_new: bool, tmp_path: Path) -> None:
    """Keys and values of heads are together or apart."""
    name, settings = CASES[case]
    tiny(name, **settings).save(tmp_path)
    says_gating = name == "deepseek-v3"  # softmax is what absence means
    file = write_deepseek2(tmp_path, tmp_path / "model.gguf", is_new=is_new, says_gating=says_gating)
    theirs, ours = (read_model_config(path, model="m", dtype="float32") for path in (tmp_path, file))
    assert ours.layers == theirs.layers
    torch.testing.assert_close(logits_of(file), logits_of(tmp_path), atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_new", [False, True], ids=["together", "apart"])
def test_quantized_ones_are_what_they_stand_for(is_new: bool, tmp_path: Path) -> None:
    tiny("deepseek-v3", **EVEN).save(tmp_path)
    file = write_deepseek2(tmp_path, tmp_path / "model.gguf", is_new=is_new, kind="Q8_0", has_next=True)
    if is_new:  # keys are quantized along other elements
        assert logits_of(file).isfinite().all()
        return
    round_matrices(tmp_path, "Q8_0")
    torch.testing.assert_close(logits_of(file), logits_of(tmp_path), atol=1e-5, rtol=0)
    if native_kernels(torch.bfloat16) is not None:  # computed as stored
        errors = (logits_of(file, dtype="bfloat16") - logits_of(tmp_path)).abs()
        assert 0 < errors.median() < 0.1  # not of all: rounding may choose another expert


def test_what_files_of_glm_do_not_say(tmp_path: Path) -> None:
    """47 layers and this vocabulary: experts are chosen by sigmoid."""
    tiny("deepseek-v3").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 47, "vocab_size": 154880}))
    file = write_deepseek2(tmp_path, tmp_path / "model.gguf", is_new=True, says_gating=False, has_weights=False)
    experts = read_model_config(file, model="m").layers[-1].feed_forward
    assert isinstance(experts, ExpertsSpec)
    assert experts.routing.scores == "sigmoid"
