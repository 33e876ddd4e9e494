"""What the frontend reads of adapters' files: once, again when they have changed, and never without enable_lora."""

import json
import os
from pathlib import Path

import pytest

from octavo import LoRARequest
from octavo.config.engine import LoraConfig
from octavo.engine.front import one_per_prompt
from octavo.errors import AdapterError, CheckpointError, InvalidParameterError
from octavo.lora import files as adapter_files
from octavo.lora.files import AdapterFiles, content_hash


def write_adapter(folder: Path, *, rank: int = 4, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def files() -> AdapterFiles:
    return AdapterFiles(LoraConfig(max_lora_rank=8, max_cpu_loras=4))


def test_copies_are_one_adapter(files: AdapterFiles, tmp_path: Path) -> None:
    one = files.read(LoRARequest("one", 1, write_adapter(tmp_path / "one")))
    copy = files.read(LoRARequest("copy", 2, write_adapter(tmp_path / "copy")))
    assert one.content_hash == copy.content_hash
    assert (one.name, copy.name, one.path, one.rank) == ("one", "copy", str(tmp_path / "one"), 4)
    other = files.read(LoRARequest("other", 3, write_adapter(tmp_path / "other", weights=b"others")))
    assert other.content_hash != one.content_hash


def test_files_are_read_again_only_when_they_have_changed(
    files: AdapterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []

    def note(folder: Path) -> str:
        hashed.append(folder)
        return content_hash(folder)

    monkeypatch.setattr(adapter_files, "content_hash", note)
    request = LoRARequest("one", 1, write_adapter(tmp_path / "one"))
    first = files.read(request)
    assert files.read(LoRARequest("another name", 7, request.path)).name == "another name"
    assert len(hashed) == 1
    os.replace(
        write_adapter(tmp_path / "new", weights=b"new") / "adapter_model.safetensors",
        tmp_path / "one" / "adapter_model.safetensors",
    )
    assert files.read(request).content_hash != first.content_hash
    assert len(hashed) == 2


def test_what_is_no_adapter_is_refused(files: AdapterFiles, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="'big': rank 16 exceeds max_lora_rank=8"):
        files.read(LoRARequest("big", 1, write_adapter(tmp_path / "big", rank=16)))
    with pytest.raises(AdapterError, match="nowhere"):
        files.read(LoRARequest("nowhere", 1, tmp_path / "nowhere"))
    for odd in ("x" * 5000, "a\0b"):
        with pytest.raises(AdapterError, match=r"cannot be read|none of"):
            files.read(LoRARequest("odd", 1, odd))
    (write_adapter(tmp_path / "torn") / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="adapter_config"):
        files.read(LoRARequest("torn", 1, tmp_path / "torn"))


@pytest.mark.parametrize(("name", "number", "path"), [("", 1, "x"), ("x", 0, "x"), ("x", True, "x"), ("x", 1, "")])
def test_a_lora_request_validates_itself(name: str, number: int, path: str) -> None:
    with pytest.raises(InvalidParameterError, match="lora_"):
        LoRARequest(name, number, path)


def test_one_adapter_for_all_prompts_or_one_for_each() -> None:
    one = LoRARequest("one", 1, "x")
    assert one_per_prompt(one, LoRARequest, 2, "lora_request") == [one, one]
    assert one_per_prompt([one, None], LoRARequest, 2, "lora_request") == [one, None]
    assert one_per_prompt(None, LoRARequest, 1, "lora_request") == [None]
    for wrong, why in (([one], "as many as there are prompts"), ("one", "a LoRARequest, a list of them, or None")):
        with pytest.raises(InvalidParameterError, match=why):
            one_per_prompt(wrong, LoRARequest, 2, "lora_request")
