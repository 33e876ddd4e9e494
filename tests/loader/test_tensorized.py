"""Tensorizer files, from a folder and from a web server, against those that the library of that name writes."""

import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.models.paged import PagedRunner, load, make_context
from tests.models.tiny import TINY_MODELS

from octavo.config.args import EngineArgs
from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.loader.packed_cache import PackedModel
from octavo.loader.registry import get_model_loader

TOKENS = [5, 9, 33, 60, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, as safetensors and as tensorizer file side by side."""
    pytest.importorskip("tensorizer", reason="the library tensorizer is not installed (make test does it)")
    made = tmp_path_factory.mktemp("tensorized")
    next(case for case in TINY_MODELS if case.name == "qwen3").save(made / "source")
    convert(Checkpoint.open(str(made / "source")), made / "out", "tensorizer", TargetOptions())
    return made


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def logits_of(folder: Path, uri: str | None = None) -> torch.Tensor:
    config = read_model_config(folder, model="m", dtype="float32")
    loader = get_model_loader(LoadConfig(load_format="auto", seed=0, tensorizer_uri=uri))
    return PagedRunner(loader.load_model(config, make_context())).step({0: TOKENS})[0]


def test_a_file_is_the_same_model(folder: Path) -> None:
    expected = logits_of(folder / "source")
    assert torch.equal(logits_of(folder / "out"), expected)
    assert torch.equal(logits_of(folder / "source", str(folder / "out" / "model.tensors")), expected)
    from tensorizer import TensorDeserializer

    theirs, ours = (
        TensorDeserializer(str(folder / "out" / "model.tensors"), device="cpu"),
        load_file(folder / "source" / "model.safetensors"),
    )
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_an_address_is_the_same_model(folder: Path, server: str) -> None:
    assert torch.equal(logits_of(folder / "source", f"{server}/out/model.tensors"), logits_of(folder / "source"))
    with pytest.raises(CheckpointError, match=r"out/none\.tensors: cannot be read: HTTP Error 404"):
        logits_of(folder / "source", f"{server}/out/none.tensors")
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:1/model\.tensors: cannot be read: .*refused"):
        logits_of(folder / "source", "http://127.0.0.1:1/model.tensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8, torch.float64])
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    library = pytest.importorskip("tensorizer")
    from octavo.loader.tensorized import _opened, read_index

    tensors = {"a.weight": torch.randn(3, 5).mul(50).to(dtype), "one": torch.tensor(7.0).to(dtype)}
    writer = library.TensorSerializer(str(tmp_path / "x.tensors"))
    writer.write_state_dict(tensors)
    writer.close()
    with _opened(str(tmp_path / "x.tensors")) as stream:
        for entry in read_index(stream.read, stream.num_bytes, "x"):
            stream.skip_to(entry.start)
            found = stream.tensor(entry)
            assert found.dtype == dtype
            assert torch.equal(found.float(), tensors[entry.name].float())


def test_nothing_remote_is_kept_as_packed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    model = load(folder / "source", dtype="bfloat16")
    for uri, is_kept in ((None, True), ("http://127.0.0.1:1/x", False)):
        config = LoadConfig(load_format="tensorizer", seed=0, tensorizer_uri=uri, packed_cache_bytes=1 << 30)
        if model.context.kernels.name.startswith("native"):
            assert (PackedModel.of(model, config) is not None) == is_kept


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (folder / "out" / "model.tensors").read_bytes()
    file = tmp_path / "model.tensors"
    for data, error, said in (
        (b"nonsense", CheckpointError, "not a tensorizer file"),
        (whole[:40], CheckpointError, "the file ends at byte 40"),
        (whole[: len(whole) * 3 // 4], CheckpointError, "cannot be the .* bytes from"),
        (whole[:5] + b"\x03" + whole[6:], UnsupportedModelError, "encrypted tensors"),
        (whole[:5] + b"\x09" + whole[6:], UnsupportedModelError, "version 9 with flags 0x0"),
    ):
        file.write_bytes(data)
        with pytest.raises(error, match=f"model.tensors: .*{said}"):
            logits_of(folder / "source", str(file))
    with pytest.raises(
        InvalidParameterError, match="tensorizer_uri='x': unset: it has no effect with load_format='pt'"
    ):
        EngineArgs(tensorizer_uri="x", load_format="pt")
    monkeypatch.setitem(sys.modules, "tensorizer.serialization", None)
    with pytest.raises(InvalidParameterError, match=r"to='tensorizer': needs .* pip install 'octavo\[tensorizer\]'"):
        convert(Checkpoint.open(str(folder / "source")), tmp_path / "out", "tensorizer", TargetOptions())
    assert not (tmp_path / "out").exists()
