"""Division of a model into stages: balance of weights, and what each stage reads from a checkpoint."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.paged import make_context
from tests.models.tiny import TINY_MODELS

from octavo.config.engine import LoadConfig, LoadFormat
from octavo.config.hf import read_model_config
from octavo.config.hub import resolve_model
from octavo.config.model import ModelConfig
from octavo.config.parallel import ParallelConfig, RankPlace, Stage
from octavo.errors import CheckpointError
from octavo.loader.base import ModelLoader
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.models.registry import initialize_model
from octavo.models.weights import weight_slots
from octavo.worker.memory import empty_model, num_weights
from octavo.worker.stages import plan_stages

CASES = {case.name: case for case in TINY_MODELS}
DEMO = read_model_config(resolve_model("demo"), model="demo")


def with_layers(num_layers: int, vocab_size: int) -> ModelConfig:
    return replace(DEMO, layers=DEMO.layers[:1] * num_layers, vocab_size=vocab_size)


def lengths(model: ModelConfig, num_stages: int) -> list[int]:
    return [len(stage.layers) for stage in plan_stages(model, num_stages)]


@pytest.mark.parametrize(("num_layers", "num_stages"), [(1, 1), (3, 3), (7, 2), (7, 3), (28, 4), (61, 8)])
def test_stages_are_consecutive_and_cover_all_layers(num_layers: int, num_stages: int) -> None:
    stages = plan_stages(with_layers(num_layers, 1000), num_stages)
    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    assert all(stage.layers for stage in stages)
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]


def test_without_a_vocabulary_to_speak_of_layers_are_shared_evenly() -> None:
    assert sorted(lengths(with_layers(8, 1), 2)) == [4, 4]
    assert sorted(lengths(with_layers(8, 1), 3)) == [2, 3, 3]


def test_embedding_and_head_count() -> None:
    """A table as large as two layers at either end leaves those stages two layers fewer."""
    layer = num_weights(empty_model(DEMO).get_submodule("layers.0"))
    model = with_layers(14, 2 * layer // DEMO.hidden_size)
    assert lengths(model, 3) == [4, 6, 4]
    huge = with_layers(6, 100 * layer // DEMO.hidden_size)
    assert lengths(huge, 3) == [1, 4, 1]


@pytest.mark.parametrize("num_layers", range(3, 10))
def test_no_other_cut_has_a_smaller_largest_stage(num_layers: int) -> None:
    model = with_layers(num_layers, 1500)
    largest = max(held(model, stage) for stage in plan_stages(model, 3))
    for first in range(1, num_layers - 1):
        for second in range(first + 1, num_layers):
            cuts = pairwise((0, first, second, num_layers))
            others = [
                Stage(first_layer=start, end_layer=end, is_first=start == 0, is_last=end == num_layers)
                for start, end in cuts
            ]
            assert max(held(model, stage) for stage in others) >= largest


def held(model: ModelConfig, stage: Stage) -> int:
    """Count as the plan does; the last norm is too small to matter."""
    return num_weights(build(model, stage)) - model.hidden_size * stage.is_last


def test_places_have_their_stage() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    places = [RankPlace.of(rank, parallel) for rank in range(6)]
    stages = [plan_stages(DEMO, place.pp_size)[place.pp_rank] for place in places]
    assert stages[::2] == stages[1::2] == plan_stages(DEMO, 3)
    assert plan_stages(DEMO, 1) == [Stage.whole(DEMO.num_layers)]


# -- what a stage reads ------------------------------------------------------------------------------------------------


def stages_of(folder: Path, num_stages: int = 3) -> list[tuple[ModelConfig, Stage]]:
    model = read_model_config(folder, model="tiny")
    return [(model, stage) for stage in plan_stages(model, num_stages)]


def build(model: ModelConfig, stage: Stage) -> CausalLM:
    return initialize_model(model, replace(make_context(), stage=stage))


def loader(load_format: LoadFormat = "auto") -> ModelLoader:
    return get_model_loader(LoadConfig(load_format=load_format, seed=3))


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "qwen3-tied-gqa-8", "llama-biases"])
def test_every_tensor_is_read_by_the_stage_that_needs_it_and_by_no_other(name: str, tmp_path: Path) -> None:
    CASES[name].save(tmp_path)
    models = [build(*stage) for stage in stages_of(tmp_path)]
    reads = [[found for found, _ in loader().tensors(model)] for model in models]
    assert [sorted(names) for names in reads] == [sorted(weight_slots(model)) for model in models]
    table = ["model.embed_tokens.weight"] if models[0].config.tie_word_embeddings else []
    in_file = list(load_file(tmp_path / "model.safetensors"))
    assert sorted(name for names in reads for name in names) == sorted(in_file + table)
    for model in models:
        loader().load_model(model.config, model.context)


def test_a_file_with_nothing_for_a_stage_is_not_opened(tmp_path: Path) -> None:
    CASES["qwen3"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: "first.safetensors" if ".layers.0." in name else "rest.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    rest = {name: tensor for name, tensor in tensors.items() if weight_map[name] == "rest.safetensors"}
    save_file(rest, tmp_path / "rest.safetensors", metadata={"format": "pt"})
    (first_model, first), *others = stages_of(tmp_path)
    for model, stage in others:
        loader().load_model(model, replace(make_context(), stage=stage))
    with pytest.raises(CheckpointError, match=r"first\.safetensors: missing"):
        loader().load_model(first_model, replace(make_context(), stage=first))


@pytest.mark.parametrize(
    ("missing", "stage_number"),
    [
        ("model.embed_tokens.weight", 0),
        ("model.layers.1.self_attn.q_proj.weight", 1),
        ("model.norm.weight", 2),
        ("lm_head.weight", 2),
    ],
)
def test_what_is_missing_is_missed_by_its_stage(missing: str, stage_number: int, tmp_path: Path) -> None:
    CASES["qwen3"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for number, (model, stage) in enumerate(stages_of(tmp_path)):
        context = replace(make_context(), stage=stage)
        if number == stage_number:
            with pytest.raises(CheckpointError, match=f"{missing}.*is missing"):
                loader().load_model(model, context)
        else:
            loader().load_model(model, context)


def test_a_tensor_without_a_place_is_refused_by_every_stage_or_by_its_own(tmp_path: Path) -> None:
    CASES["qwen3"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    for unknown, refusing in (("model.extra.weight", [0, 1, 2]), ("model.layers.1.extra.weight", [1])):
        save_file({**tensors, unknown: torch.zeros(3)}, path, metadata={"format": "pt"})
        for number, (model, stage) in enumerate(stages_of(tmp_path)):
            if number in refusing:
                with pytest.raises(CheckpointError, match=f"{unknown}' has no place"):
                    loader().load_model(model, replace(make_context(), stage=stage))
            else:
                loader().load_model(model, replace(make_context(), stage=stage))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied-gqa-8", "llama-biases"])
def test_dummy_weights_of_stages_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    CASES[name].build().config.save_pretrained(tmp_path)
    [(model, whole)] = stages_of(tmp_path, 1)
    expected = dict(loader("dummy").tensors(build(model, whole)))
    seen: set[str] = set()
    for stage in stages_of(tmp_path):
        for found, tensor in loader("dummy").tensors(build(*stage)):
            assert torch.equal(tensor, expected[found])
            seen.add(found)
    assert seen == expected.keys()
    assert num_weights(empty_model(model)) == sum(tensor.numel() for tensor in expected.values())
