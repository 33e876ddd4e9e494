"""Experts: both spellings of a checkpoint, stacks that do not fit, and every setting shows in the logits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from tests.models.paged import PagedRunner, load
from tests.models.test_family import CASES, TOKENS, load_as

from octavo.config.hf import read_model_config
from octavo.config.layers import ExpertsSpec
from octavo.errors import CheckpointError
from octavo.layers.moe import MixtureOfExperts

NAMES = [name for name in CASES if name.startswith("mixtral") or "moe" in name]


@pytest.mark.parametrize("name", NAMES)
def test_stacked_experts_are_the_same_experts(name: str, tmp_path: Path) -> None:
    each, stacked = tmp_path / "each", tmp_path / "stacked"
    CASES[name].save(each)
    CASES[name].build().save_pretrained(stacked, save_original_format=False)
    names = load_file(stacked / "model.safetensors").keys()
    assert any(name.endswith(".experts.gate_up_proj") for name in names)
    logits = [PagedRunner(load(folder)).step({0: TOKENS})[0] for folder in (each, stacked)]
    assert torch.equal(*logits)


def test_a_stack_that_does_not_fit_is_named(tmp_path: Path) -> None:
    CASES["qwen3-moe"].build().save_pretrained(tmp_path, save_original_format=False)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.experts.gate_up_proj"
    for change, message in [
        (tensors[name][:4], r"a stack of 5 experts is expected, found \[4, 42, 36\]"),
        (tensors[name][:, :40], r"experts.0.gate_proj.weight': shape \[21, 36\] is expected, found \[20, 36\]"),
        (tensors[name][0], r"a stack of 5 experts is expected, found \[42, 36\]"),
    ]:
        save_file({**tensors, name: change.contiguous()}, file)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.experts.0.gate_proj.weight' .* is missing \(and 9"):
        load(tmp_path)


def test_how_tokens_choose_shows_in_the_logits(tmp_path: Path) -> None:
    CASES["qwen2-moe"].save(tmp_path)
    config = read_model_config(tmp_path, model="x")
    expected = load_as(config)
    for change in ({"top_k": 3}, {"renormalizes": True}):
        changed = tuple(
            replace(layer, feed_forward=structs.replace(layer.feed_forward, **change))
            if isinstance(layer.feed_forward, ExpertsSpec)
            else layer
            for layer in config.layers
        )
        assert (load_as(replace(config, layers=changed)) - expected).abs().max() > 0.05


def test_tokens_are_counted_by_expert(tmp_path: Path) -> None:
    CASES["qwen3-moe-mixed"].save(tmp_path)
    model = load(tmp_path)
    runner = PagedRunner(model)
    runner.step({0: TOKENS})
    runner.step({0: [5], 1: [7]})
    loads = [module.load for module in model.modules() if isinstance(module, MixtureOfExperts)]
    assert [int(load.sum()) for load in loads] == [2 * (len(TOKENS) + 2)] * 2
    assert all((load > 0).sum() > 2 for load in loads)
