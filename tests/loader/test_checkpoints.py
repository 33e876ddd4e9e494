"""Checkpoints good and bad: each way to break one gives a `CheckpointError` that names what is wrong."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.paged import PagedRunner, load, make_context
from tests.models.tiny import TINY_MODELS

from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.loader.registry import get_model_loader
from octavo.loader.stored_tensors import stored_tensors
from octavo.models.interfaces import CausalLM
from octavo.models.registry import initialize_model
from octavo.models.weights import tensors_by_owner
from octavo.worker.stages import plan_stages

TOKENS = [5, 9, 33, 60, 4]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untied Qwen3 checkpoint that no test changes."""
    folder = tmp_path_factory.mktemp("qwen3")
    next(case for case in TINY_MODELS if case.name == "qwen3").save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint, to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def logits_of(folder: Path) -> torch.Tensor:
    return PagedRunner(load(folder)).step({0: TOKENS})[0]


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def shard(folder: Path) -> dict[str, str]:
    """Split the one file into three with an index; return the index's map."""
    tensors = load_file(folder / "model.safetensors")
    weight_map = {name: f"model-{index % 3 + 1:05d}-of-00003.safetensors" for index, name in enumerate(tensors)}
    for file_name in set(weight_map.values()):
        part = {name: tensors[name] for name, its_file in weight_map.items() if its_file == file_name}
        save_file(part, folder / file_name, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_the_same_model(saved: Path, folder: Path) -> None:
    shard(folder)
    assert torch.equal(logits_of(folder), logits_of(saved))


@pytest.mark.parametrize("left", ["shards", "index", "damaged index"])
def test_a_single_file_is_the_model_whatever_index_is_beside_it(
    left: str, saved: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As fine-tuning tools leave a folder: the new weights in one file, beside the old shards or their index."""
    edit_tensors(folder, lambda tensors: tensors.update({name: each + 1 for name, each in tensors.items()}))
    shard(folder)
    if left != "shards":
        for file in folder.glob("model-*.safetensors"):
            file.unlink()
    if left == "damaged index":
        (folder / "model.safetensors.index.json").write_text("{")
    shutil.copyfile(saved / "model.safetensors", folder / "model.safetensors")
    assert torch.equal(logits_of(folder), logits_of(saved))
    assert list(stored_tensors(folder)) == list(stored_tensors(saved))
    assert "index.json has no effect" in caplog.text


def test_an_index_of_the_single_file_is_nothing_to_warn_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_index(folder, dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors"))
    load(folder)
    assert "has no effect" not in caplog.text


def test_dtypes_convert(saved: Path, folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: value.double() for name, value in tensors.items()}))
    assert torch.equal(logits_of(folder), logits_of(saved))
    edit_tensors(folder, lambda tensors: tensors.update({name: value.bfloat16() for name, value in tensors.items()}))
    # bf16 keeps 8 bits, so weights move by up to 1/512 of themselves; logits reach 6.
    torch.testing.assert_close(logits_of(folder), logits_of(saved), atol=0.3, rtol=0)
    assert not torch.equal(logits_of(folder), logits_of(saved))


def test_documented_buffers_and_a_redundant_head_are_left_alone(tmp_path: Path) -> None:
    next(case for case in TINY_MODELS if case.name == "llama-tied").save(tmp_path)
    before = logits_of(tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5),
        "model.rotary_emb.inv_freq": torch.zeros(5),
        "lm_head.weight": load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone(),
    }
    edit_tensors(tmp_path, lambda tensors: tensors.update(extra))
    model = load(tmp_path)
    assert torch.equal(PagedRunner(model).step({0: TOKENS})[0], before)
    assert model.config.tie_word_embeddings  # so the table is in memory once


def save_torch(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    whole = torch.cat([torch.zeros(3, 36), tensors["lm_head.weight"]])  # a tensor that begins within its storage
    torch.save({**tensors, "lm_head.weight": whole[3:]}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


FORMATS: dict[str, Callable[[Path], object]] = {
    "one file": lambda folder: None,
    "shards": shard,
    "torch": save_torch,
}


@pytest.mark.parametrize("stored", FORMATS)
def test_a_head_of_its_own_counts_more_than_the_key_that_ties_it(
    stored: str, saved: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(folder, tie_word_embeddings=True)
    FORMATS[stored](folder)
    assert torch.equal(logits_of(folder), logits_of(saved))
    [record] = caplog.records
    assert "tie_word_embeddings is true, but the file has an lm_head that differs" in record.message


def test_a_tied_head_of_another_shape_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    next(case for case in TINY_MODELS if case.name == "llama-tied").save(tmp_path)
    before = logits_of(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(96, 36)}))
    assert torch.equal(logits_of(tmp_path), before)
    assert "lm_head of shape [96, 36]: it is not used" in caplog.text


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_tied_table_may_have_the_name_of_the_head(num_stages: int, tmp_path: Path) -> None:
    next(case for case in TINY_MODELS if case.name == "llama-tied").save(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    table = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    config = read_model_config(tmp_path, model="tiny")
    for stage in plan_stages(config, num_stages):
        model = initialize_model(config, replace(make_context(), stage=stage))
        found = [tensor for _, group in tensors_by_owner(model, read(model)) for tensor in group.values()]
        has_table = any(torch.equal(tensor, table) for tensor in found)
        assert has_table == (stage.is_first or stage.is_last)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_a_model_saved_without_its_head(name: str, tmp_path: Path) -> None:
    saved = next(case for case in TINY_MODELS if case.name == name).save(tmp_path / "whole")
    saved.model.save_pretrained(tmp_path / "base")
    assert torch.equal(logits_of(tmp_path / "base"), logits_of(tmp_path / "whole"))
    edit_config(tmp_path / "base", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' of shape \[97, 36\] is missing"):
        load(tmp_path / "base")


def in_vision_model(name: str) -> str:
    return f"model.language_{name}" if name.startswith("model.") else name


def compiled_in_parts(name: str) -> str:
    return name.replace("mlp.", "_orig_mod.mlp._checkpoint_wrapped_module.")


@pytest.mark.parametrize(
    "rename",
    [
        *map("{}{{}}".format, ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod.", "language_model."]),
        in_vision_model,
        compiled_in_parts,
    ],
)
def test_names_as_training_leaves_them(rename: str | Callable[[str], str], saved: Path, folder: Path) -> None:
    spell = rename.format if isinstance(rename, str) else rename
    tensors = load_file(folder / "model.safetensors")
    save_file({spell(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(logits_of(folder), logits_of(saved))


def test_a_value_head_is_left_unused_and_said(saved: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = {"v_head.summary.weight": torch.ones(1, 36), "v_head.summary.bias": torch.ones(1)}
    edit_tensors(folder, lambda tensors: tensors.update(head))
    assert torch.equal(logits_of(folder), logits_of(saved))
    [record] = caplog.records
    assert "2 tensors such as v_head.summary" in record.message
    assert "are not used: a value head rates text" in record.message


def read(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    return get_model_loader(LoadConfig(load_format="auto", seed=0)).tensors(model)


def test_missing_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(CheckpointError, match=rf"tensor '{Q_PROJ}' of shape \[60, 36\] is missing$"):
        load(folder)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"is missing \(and 1 more\)"):
        load(folder)


def test_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(60, 35)}))
    with pytest.raises(CheckpointError, match=rf"'{Q_PROJ}': shape \[60, 36\] is expected, found \[60, 35\]"):
        load(folder)


def test_tensor_without_a_place(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(6)}))
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.sinks' has no place in Qwen3ForCausalLM"):
        load(folder)


def test_tensor_of_a_dtype_that_holds_no_weights(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(60, 36, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"'{Q_PROJ}': dtype torch.int8 cannot be loaded"):
        load(folder)


def test_dtype_that_nobody_knows(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"dtype":"F32"', b'"dtype":"Q32"'))
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated or malformed: .*Q32"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated or malformed"):
        load(folder)


def test_malformed_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"[" + content[9:])
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated or malformed"):
        load(folder)


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: missing, although .* lists it"):
        load(folder)


def test_shard_without_a_tensor_that_the_index_lists(folder: Path) -> None:
    weight_map = shard(folder)
    write_index(
        folder, {**weight_map, Q_PROJ: next(file for file in weight_map.values() if file != weight_map[Q_PROJ])}
    )
    with pytest.raises(CheckpointError, match=rf"tensor '{Q_PROJ}' is missing, although .* lists it here"):
        load(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "weight_map=None: tensor names and their files"),
        ([], r"weight_map=\[\]: an object"),
        ({"lm_head.weight": 3}, "lm_head.weight=3: a string"),
        ({"lm_head.weight": "../model.safetensors"}, "the name of a file in the same folder"),
        ({"lm_head.weight": ".."}, "the name of a file in the same folder"),
        ({"lm_head.weight": "\ud800.safetensors"}, "the name of a file in the same folder"),
    ],
)
def test_bad_index(folder: Path, weight_map: object, message: str) -> None:
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=f"index.json.*{message}"):
        load(folder)


def test_index_that_is_not_json(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    (folder / "model.safetensors").unlink()
    for text, message in (("{", ""), ('{"weight_map": {"a": "x", "a": "y"}}', ".*'a' is given twice: 'x' and 'y'")):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=rf"index\.json: not valid JSON{message}"):
            load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights: none of model.safetensors, .*; there are config.json, "):
        load(folder)


def test_unknown_architecture(folder: Path) -> None:
    edit_config(folder, architectures=["Qwen4ForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"'Qwen4ForCausalLM' is not supported; did you mean 'Qwen\dFor"):
        load(folder)


def test_configuration_that_does_not_match_the_weights(folder: Path) -> None:
    edit_config(folder, intermediate_size=46)
    with pytest.raises(CheckpointError, match=r"shape \[\d+, \d+\] is expected, found"):
        load(folder)


def test_an_unknown_format() -> None:
    with pytest.raises(InvalidParameterError, match="load_format='zip': unknown; one of auto, safetensors"):
        get_model_loader(LoadConfig(load_format="zip", seed=0))  # type: ignore[arg-type]


def test_a_file_is_mapped_anew_every_so_many_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.loader.safetensors._MAPPED_BYTES", 4096)
    loader = get_model_loader(LoadConfig(load_format="safetensors", seed=0))
    max_mappings = 0
    for _name, _tensor in loader.tensors(load(folder)):
        max_mappings = max(max_mappings, Path("/proc/self/maps").read_text().count(str(folder / "model.safetensors")))
    assert max_mappings == 1
