"""The comparison with transformers has teeth, and tables are whole: no part of a model can be left out unnoticed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.breadth import pick
from tests.models.paged import PagedRunner, load, make_context
from tests.models.tiny import TINY_MODELS, TinyModel, saved

from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.config.layers import RopeConfig
from octavo.config.model import ModelConfig
from octavo.layers.weight_owner import WeightOwner
from octavo.loader.registry import get_model_loader
from octavo.models.registry import initialize_model
from octavo.models.weights import spelt_as_in_table, weight_slots
from octavo.worker.memory import empty_model, num_weights

TOKENS = [(7 * index) % 90 + 3 for index in range(30)]
CASES = {case.name: case for case in TINY_MODELS}


def load_as(config: ModelConfig) -> torch.Tensor:
    """Load the checkpoint under this configuration and return logits."""
    loader = get_model_loader(LoadConfig(load_format="auto", seed=0))
    return PagedRunner(loader.load_model(config, make_context())).step({0: TOKENS})[0]


@pytest.mark.parametrize("name", ["llama-linear", "llama-3.1", "llama-yarn", "llama-yarn-mscale", "qwen2-yarn"])
def test_rope_scaling_shows_in_the_logits(name: str) -> None:
    config = read_model_config(saved(name)[0], model=name)
    plain = replace(
        config, rotary=tuple(replace(each, rope=RopeConfig(theta=each.rope.theta)) for each in config.rotary)
    )
    assert (load_as(config) - load_as(plain)).abs().max() > 0.1


def with_windows(config: ModelConfig, windows: tuple[int | None, ...]) -> ModelConfig:
    layers = zip(config.layers, windows, strict=True)
    return replace(config, layers=tuple(layer.with_attention(sliding_window=window) for layer, window in layers))


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-windows", "qwen3-mixed-windows"])
def test_sliding_windows_show_in_the_logits(name: str) -> None:
    config = read_model_config(saved(name)[0], model=name)
    windows = config.sliding_windows
    assert any(windows)
    wider = tuple(window and window + 1 for window in windows)
    for changed in (wider, (None,) * len(windows), windows[1:] + windows[:1]):
        difference = (load_as(config) - load_as(with_windows(config, changed))).abs().max()
        assert difference > 0.1 or changed == windows


@pytest.mark.parametrize("case", TINY_MODELS, ids=lambda case: case.name)
def test_every_weight_has_its_row_in_the_table(case: TinyModel) -> None:
    folder, _ = saved(case.name)
    model = initialize_model(read_model_config(folder, model=case.name), make_context())
    slots = weight_slots(model)
    tensors = spelt_as_in_table(model, load_file(folder / "model.safetensors").items())
    shapes = {name: tuple(of.shape) for name, of in tensors if not model.ignores_weight(name)}
    assert slots.keys() == shapes.keys()
    assert all(shapes[name] in (slot.spec.shape, *slot.spec.other_shapes) for name, slot in slots.items())
    reached = {id(slot.owner) for slot in slots.values()}
    owners = [module for module in model.modules() if isinstance(module, WeightOwner) and module.checkpoint_tensors()]
    assert all(id(owner) in reached for owner in owners)


@pytest.mark.parametrize("case", TINY_MODELS, ids=lambda case: case.name)
def test_parameters_are_counted_as_transformers_counts_them(case: TinyModel) -> None:
    folder, reference = saved(case.name)
    expected = sum(each.numel() for name, each in reference.named_parameters() if "vision" not in name)
    # To transformers, what a router adds to its scores is no parameter.
    expected += sum(
        of.numel()
        for name, of in reference.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    )
    assert num_weights(empty_model(read_model_config(folder, model="tiny"))) == expected


@pytest.mark.parametrize("case", TINY_MODELS[:: pick(3, 1)], ids=lambda case: case.name)
def test_every_architecture_computes_with_dummy_weights(case: TinyModel, tmp_path: Path) -> None:
    """From `config.json` alone."""
    saved(case.name)[1].config.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    [logits] = PagedRunner(load(tmp_path, load_format="dummy")).step({0: TOKENS[:5]})
    assert logits.isfinite().all()
    # Variance is kept from layer to layer, so logits are of the order of one.
    assert 0.1 < logits.std() < 10.0
