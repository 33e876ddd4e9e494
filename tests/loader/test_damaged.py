"""Damaged checkpoints of every format load, or a typed error names the file: nothing else, and no memory for it."""

import json
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.breadth import pick
from tests.gguf.files import convert as write_gguf
from tests.loader.quantized_files import awq, save_pair
from tests.models.paged import load
from tests.models.tiny import TINY_MODELS

from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.errors import CheckpointError, UnsupportedModelError

FORMATS = ["safetensors", "shards", "pt", "gguf", "tensorizer", "sharded_state", "awq"]
NUM_CUTS, NUM_CHANGES = pick(4, 30), pick(10, 150)
ABSURD = [b"\xff", b"\xff" * 4, b"\xff" * 8, (2**40).to_bytes(8, "little"), b"\0" * 4, b"../../x", b"\x80\x00"]
MAX_GROWTH_KB = 400_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "safetensors"
    next(case for case in TINY_MODELS if case.name == "llama").save(folder)
    return folder


def write(saved: Path, kind: str, out: Path) -> Path:
    """Write the checkpoint in a format. Returns what to load."""
    if kind == "gguf":
        out.mkdir()
        return write_gguf(saved, out / "model.gguf", "F16")
    if kind == "awq":
        save_pair(out, {"quant_method": "awq", "bits": 4, "group_size": 32}, lambda layer: True, awq(32))
        shutil.rmtree(out / "dense")
        return out / "quantized"
    if kind == "tensorizer":
        pytest.importorskip("tensorizer", reason="the library tensorizer is not installed (make test does it)")
    options = TargetOptions(max_shard_bytes=40_000 if kind == "shards" else None)
    convert(Checkpoint.open(str(saved)), out, "safetensors" if kind == "shards" else kind, options)
    return out


def damaged(whole: bytes, dice: random.Random) -> Iterator[bytes]:
    """Yield a file cut off at many places, and with absurd bytes, mostly in what is not zero near its two ends."""
    for _ in range(NUM_CUTS):
        yield whole[: dice.choice([dice.randrange(200), dice.randrange(len(whole))])]
    ends = [*range(min(4096, len(whole))), *range(max(0, len(whole) - 4096), len(whole))]
    places = [place for place in ends if whole[place]]
    for _ in range(NUM_CHANGES):
        place, value = dice.choice(places), dice.choice(ABSURD)
        yield whole[:place] + value + whole[place + len(value) :]


def check(path: Path, what: str) -> None:
    said = str(path.parent)
    try:
        load(path)
    except (CheckpointError, UnsupportedModelError) as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    assert str(path.parent) in said, what


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", FORMATS)
def test_it_loads_or_a_typed_error_names_the_file(kind: str, saved: Path, tmp_path: Path) -> None:
    path = write(saved, kind, tmp_path / "checkpoint")
    load(path)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder, dice = (path.parent if path.is_file() else path), random.Random(0)
    for file in sorted(folder.iterdir())[:: pick(2, 1)] if kind == "shards" else sorted(folder.iterdir()):
        if file.name == "generation_config.json":
            continue
        whole = file.read_bytes()
        for index, data in enumerate(damaged(whole, dice)):
            file.unlink()  # not written over: earlier loads may have it mapped
            file.write_bytes(data)
            check(path, f"{kind}: {file.name} {index}")
        file.unlink()
        file.write_bytes(whole)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MAX_GROWTH_KB


@pytest.mark.parametrize("kind", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, "\ud800", "{}", "[]", "null", '{"weight_map": {"x": ".."}}']
)
def test_json_that_is_none_or_too_deep(kind: str, text: str, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    if kind != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / kind).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"config\.json|index\.json"):
        load(folder)


def test_files_that_point_in_circles_or_cannot_be(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    index = folder / "model.safetensors.index.json"
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for target in (index.name, "loop", ".", "folder", "a" * 300, "\0", "é" * 200):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, target)}))
        (folder / "loop").unlink(missing_ok=True)
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "folder").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=r"checkpoint"):
            load(folder)


def test_a_pickle_of_old_torch_says_what_to_do(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoint"))
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: not a zip archive.* torch\.save"):
        load(folder)
