"""Damaged files: a typed error that names the file, at once, whatever is wrong."""

import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.breadth import pick

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.gguf.file import GgufFile


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_scores([0.0, -1.0, 2.5])
    writer.add_add_bos_token(True)
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read(data: bytes, tmp_path: Path) -> GgufFile:
    (tmp_path / "model.gguf").write_bytes(data)
    return GgufFile.read(tmp_path / "model.gguf")


def test_a_whole_file(whole: bytes, tmp_path: Path) -> None:
    file = read(whole, tmp_path)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ab"]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.tensors["token_embd.weight"].shape == (3, 32)
    assert file.tensors["blk.0.attn_q.weight"].shape == (4, 32)


def test_cut_anywhere(whole: bytes, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    for end in range(len(whole.rstrip(b"\0"))):  # behind the last tensor there is padding
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            read(whole[:end], tmp_path)
    assert time.monotonic() - begun_s < len(whole)  # each within a second


@settings(max_examples=pick(60, 5000), deadline=None)
@given(data=st.data())
def test_flipped_bytes_and_absurd_sizes(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is read, or refused: nothing else comes out of it, and no memory is asked for."""
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 9))
        size, value = data.draw(st.sampled_from([(1, 0xFF), (4, 0xFFFFFFFF), (8, 2**64 - 1), (8, 2**40), (4, 9)]))
        broken[place : place + size] = value.to_bytes(size, "little")
    with suppress(CheckpointError, UnsupportedModelError):
        read(bytes(broken), tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize(
    ("at", "value", "error", "message"),
    [
        (0, b"GGML", CheckpointError, "not a GGUF file"),
        (4, struct.pack("<I", 1), UnsupportedModelError, "version 1; versions 2 and 3"),
        (4, struct.pack(">I", 3), UnsupportedModelError, "big-endian"),
        (8, struct.pack("<Q", 2**60), CheckpointError, "tensors cannot be in the rest of the file"),
        (16, struct.pack("<Q", 2**60), CheckpointError, "keys cannot be in the rest of the file"),
    ],
)
def test_the_start(at: int, value: bytes, error: type[Exception], message: str, whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        read(whole[:at] + value + whole[at + len(value) :], tmp_path)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q1.gguf", "llama")
    raw = np.zeros((1, 18), np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'token_embd\.weight' is of type Q1_0; supported: F32, F16"):
        GgufFile.read(tmp_path / "q1.gguf")


def write_parts(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"m-{index + 1:05}-of-{count:05}.gguf" for index in range(count)]
    for index, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_key_value("split.count", count, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.no", index, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", count, gguf.GGUFValueType.INT32)
        writer.add_tensor(f"blk.{index}.attn_norm.weight", np.full(8, index, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_parts_are_one_file(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 3)
    assert sorted(GgufFile.read(paths[0]).tensors) == [f"blk.{index}.attn_norm.weight" for index in range(3)]
    with pytest.raises(CheckpointError, match=r"not the first part; load m-00001-of-00003\.gguf"):
        GgufFile.read(paths[1])
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: no such file"):
        GgufFile.read(paths[0])
    paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts, but not named"):
        GgufFile.read(tmp_path / "renamed.gguf")


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**62, 1000])
def test_a_string_of_an_array_that_cannot_be(size: int, whole: bytes, tmp_path: Path) -> None:
    at = whole.index(struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 1) + b"b")
    with pytest.raises(CheckpointError, match=r"model\.gguf: byte .* string"):
        read(whole[:at] + struct.pack("<Q", size) + whole[at + 8 :], tmp_path)


def test_strings_of_an_array_are_decoded_when_they_are_wanted(whole: bytes, tmp_path: Path) -> None:
    at = whole.index(struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 1) + b"b")
    file = read(whole[: at + 8] + b"\xff" + whole[at + 9 :], tmp_path)
    assert file.metadata["llama.context_length"] == 64
    with pytest.raises(CheckpointError, match=r"model\.gguf: byte .* not UTF-8"):
        file.metadata["tokenizer.ggml.tokens"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((1024, 1024), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.read(path)
    data = file.tensors["token_embd.weight"].data
    before = int(data.sum(dtype=np.int64))
    assert _resident_kb(path) > 4000
    file.release_pages()
    assert _resident_kb(path) == 0
    assert int(data.sum(dtype=np.int64)) == before


def _resident_kb(path: Path) -> int:
    """Return how much of a mapped file is in this process's memory."""
    mappings = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(mapping.partition("Rss:")[2].split()[0]) for mapping in mappings)
