"""Weights that `torch.save` wrote: the logits of safetensors, and nothing in a file is ever run."""

import json
import pickle
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import load_file
from tests.models.paged import PagedRunner, load
from tests.models.tiny import TINY_MODELS

from octavo.config.engine import LoadFormat
from octavo.errors import CheckpointError
from octavo.loader.stored_tensors import stored_tensors

TOKENS = [5, 9, 33, 60, 4]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    next(case for case in TINY_MODELS if case.name == "qwen3").save(tmp_path)
    return tmp_path


def logits_of(folder: Path, load_format: LoadFormat = "auto") -> torch.Tensor:
    return PagedRunner(load(folder, load_format=load_format)).step({0: TOKENS})[0]


def take_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Remove the safetensors; return what was in them, copied, and their logits."""
    expected = logits_of(folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    return tensors, expected


@pytest.mark.parametrize("file_name", ["pytorch_model.bin", "model.pt", "model.pth"])
@pytest.mark.parametrize("nested", [False, True])
def test_one_file(file_name: str, nested: bool, folder: Path) -> None:
    tensors, expected = take_tensors(folder)
    torch.save({"state_dict": tensors, "epoch": 3} if nested else tensors, folder / file_name)
    assert torch.equal(logits_of(folder), expected)
    assert torch.equal(logits_of(folder, "pt"), expected)


def test_shards_with_an_index(folder: Path) -> None:
    tensors, expected = take_tensors(folder)
    files = {name: f"pytorch_model-{index % 3 + 1:05}-of-00003.bin" for index, name in enumerate(tensors)}
    for file_name in set(files.values()):
        torch.save(
            {name: tensors[name] for name, its_file in files.items() if its_file == file_name}, folder / file_name
        )
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(logits_of(folder), expected)
    later = {name: tensor + 1 for name, tensor in tensors.items()}
    torch.save(later, folder / "model.pt")  # no file of transformers
    assert torch.equal(logits_of(folder), expected)
    torch.save(later, folder / "pytorch_model.bin")
    assert not torch.equal(logits_of(folder), expected)
    assert {tensor.name for tensor in stored_tensors(folder)} == later.keys()
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.bin: missing, although pytorch_model\.bin\.index"):
        logits_of(folder)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("ran"),)  # type: ignore[return-value]


def test_a_pickle_that_wants_code_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _ = take_tensors(folder)
    monkeypatch.chdir(folder)
    torch.save({**tensors, "extra": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused, it asks for code to be run"):
        logits_of(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: "):
        logits_of(folder)
    assert not (folder / "ran").exists()


def test_damaged_files(folder: Path) -> None:
    tensors, _ = take_tensors(folder)
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file)
    whole = file.read_bytes()
    for end in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: "):
            logits_of(folder)
    torch.save([1, 2], file)
    with pytest.raises(CheckpointError, match="a dict of tensors by name is expected"):
        logits_of(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"none of pytorch_model\.bin, "):
        logits_of(folder, "pt")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(36).to_sparse(), "has no plain values: torch.float32 on cpu, torch.sparse_coo"),
        (torch.zeros(36, device="meta"), "has no plain values: torch.float32 on meta"),
        (torch.zeros(1).expand(2**40), r"of shape \[1099511627776\] has only 4 bytes in the file"),
    ],
)
def test_tensors_without_values_of_their_own(value: torch.Tensor, message: str, folder: Path) -> None:
    tensors, _ = take_tensors(folder)
    torch.save({**tensors, "model.norm.weight": value}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin: tensor 'model.norm.weight' {message}"):
        logits_of(folder)


def test_parameters_are_tensors_and_numbers_are_no_names(folder: Path) -> None:
    tensors, expected = take_tensors(folder)
    torch.save({name: torch.nn.Parameter(value) for name, value in tensors.items()}, folder / "pytorch_model.bin")
    assert torch.equal(logits_of(folder), expected)
    torch.save({1: torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a dict of tensors by name is expected, found the name 1"):
        logits_of(folder)


def test_a_compressed_archive_is_refused(folder: Path) -> None:
    take_tensors(folder)
    with ZipFile(folder / "pytorch_model.bin", "w", ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**20)
    with pytest.raises(CheckpointError, match=r"'archive/data\.pkl' in it is compressed"):
        logits_of(folder)


@pytest.mark.parametrize("module", [b"builtins", b"__builtin__"])
def test_a_file_that_asks_for_memory_is_refused(module: bytes, folder: Path) -> None:
    """torch's unpickler would make a gigabyte of it."""
    take_tensors(folder)
    with ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02c" + module + b"\nbytearray\nJ\0\0\0\x40\x85R.")
        archive.writestr("archive/version", "3\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused, it makes a bytearray"):
        logits_of(folder)
    with ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/version", "3\n")
    with pytest.raises(CheckpointError, match=r"one data\.pkl in it is expected, found 0"):
        logits_of(folder)
