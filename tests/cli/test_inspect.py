"""`octavo inspect`: safetensors and GGUF, for people and as JSON, without torch."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from tests.gguf.files import convert
from tests.models.gpt_oss import save_mxfp4, write_gguf
from tests.models.tiny import TINY_MODELS, by_name
from typer.testing import CliRunner

from octavo.cli import checkpoints
from octavo.config.hf import read_model_config
from octavo.convert.run import convert as write_checkpoint
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.errors import CheckpointError
from octavo.loader.stored_tensors import stored_tensors
from octavo.worker.memory import empty_model, weights_bytes

# Of whole blocks.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
app = typer.Typer()
app.command()(checkpoints.inspect)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3-moe")
    next(case for case in TINY_MODELS if case.name == "qwen3-moe").save(made)
    return made


def facts(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    found: dict[str, object] = json.loads(done.output)
    return found


def test_a_folder_and_a_file_say_the_same_of_the_model(folder: Path, tmp_path: Path) -> None:
    ours, theirs = facts(str(folder)), facts(str(convert(folder, tmp_path / "model.gguf")), "--dtype", "float32")
    assert ours["architecture"] == theirs["architecture"]
    assert "Qwen3MoeForCausalLM: 3 layers of 36, 6 heads of 10, 2 KV heads, 5 experts" in str(ours["architecture"])
    assert str(ours["weights"]).split(";")[1] == str(theirs["weights"]).split(";")[1]
    assert str(theirs["chat template"]).startswith("unknown: ")


def test_states_are_counted(tmp_path: Path) -> None:
    by_name("mamba2").save(tmp_path)
    found = facts(str(tmp_path))
    assert found["architecture"] == "Mamba2ForCausalLM: 3 layers of 36"
    # Of each layer, three rows of a convolution over 72 values and 2 * 3 * 10 keys and queries, and 6 heads of 10 x 12.
    assert 3 * (3 * 132 + 6 * 120) * 4 == 13392
    assert found["layers keep"] == "3 of them a state of 4.4 KiB"
    assert found["memory of a context"] == "13.1 KiB for 64 tokens"


def test_tensors_are_listed_with_their_types(folder: Path, tmp_path: Path) -> None:
    listed = facts(str(convert(folder, tmp_path / "model.gguf", "F16")), "--tensors")["tensors"]
    assert ["token_embd.weight", [97, 36], "F16", 97 * 36 * 2] in listed  # type: ignore[operator]


def test_what_would_be_computed_is_said(tmp_path: Path) -> None:
    """Blocks in bfloat16, floats in any other dtype."""
    case = next(case for case in TINY_MODELS if case.name == "llama-tied")
    replace(case, settings={**case.settings, **SIZES}).save(tmp_path)
    file = str(convert(tmp_path, tmp_path / "model.gguf", "Q8_0"))
    assert "computed in these blocks on a CPU" in str(facts(file)["weights"])
    assert "blocks" not in str(facts(file, "--dtype", "float32")["weights"])


def test_mxfp4_is_counted_alike_in_both_layouts(tmp_path: Path) -> None:
    """17 bytes for 32 weights; in a checkpoint two codes are a byte, and scales are no weights."""
    save_mxfp4(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "dtype": "bfloat16", "torch_dtype": None}))
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    ours, theirs = (str(facts(str(path))["weights"]).split("; ") for path in (tmp_path, file))
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    assert ours[0].startswith("0.4 M, ")
    expected = weights_bytes(empty_model(read_model_config(tmp_path, model="m")))
    assert ours[1] == f"computed in these blocks on a CPU, {expected / 1024:.1f} KiB in memory"


def test_a_tensorizer_file_says_the_same(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorizer", reason="the library tensorizer is not installed (make test does it)")
    write_checkpoint(Checkpoint.open(str(folder)), tmp_path / "out", "tensorizer", TargetOptions())
    ours, theirs = facts(str(folder), "--tensors"), facts(str(tmp_path / "out"), "--tensors")
    assert ours["weights"] == theirs["weights"]
    assert sorted(each[:2] for each in ours["tensors"]) == sorted(each[:2] for each in theirs["tensors"])  # type: ignore[attr-defined]


def test_float16_may_be_computed_in_another_dtype(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({**settings, "dtype": "float16", "torch_dtype": None}))
    assert "computed in bfloat16 on CPUs" in str(facts(str(tmp_path))["dtype"])
    assert "dtype" not in facts(str(tmp_path), "--dtype", "float16")


def test_a_damaged_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\xff\xff\xff\xff")
    command = [sys.executable, "-m", "octavo.cli.main", "inspect", str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "model.gguf: byte 8: the file ends at byte 12" in done.stderr


def test_shards_of_torch_say_the_same(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(Checkpoint.open(str(folder)), tmp_path / "out", "pt", TargetOptions(max_shard_bytes=20_000))
    assert (tmp_path / "out" / "pytorch_model.bin.index.json").is_file()
    ours, theirs = facts(str(folder), "--tensors"), facts(str(tmp_path / "out"), "--tensors")
    assert ours["weights"] == theirs["weights"]
    assert sorted(each[:2] for each in ours["tensors"]) == sorted(each[:2] for each in theirs["tensors"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": ["a", "b"], "data_offsets": [0, 8]}, "tensor 'x' cannot be"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "tensor 'x' cannot be"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}, "tensor 'x' cannot be"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "tensor 'x' of shape .3. in F32 has 8 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "its tensors are not the 8 bytes that follow"),
        (5, "tensor 'x' cannot be"),
    ],
)
def test_headers_are_checked_like_those_that_are_loaded(entry: object, message: str, tmp_path: Path) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        list(stored_tensors(tmp_path))


def test_only_what_would_be_loaded_counts(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(
        Checkpoint.open(str(folder)), tmp_path / "out", "safetensors", TargetOptions(max_shard_bytes=20_000)
    )
    (tmp_path / "out" / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert facts(str(tmp_path / "out"))["weights"] == facts(str(folder))["weights"]
    next((tmp_path / "out").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+\.safetensors: no such file"):
        list(stored_tensors(tmp_path / "out"))
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no weights: none of model\.safetensors, .*; there are no files"):
        list(stored_tensors(tmp_path / "out"))


def test_layers_and_contexts_are_counted(folder: Path) -> None:
    """3 layers of 2 KV heads of 10 numbers, keys and values, in float32: 160 bytes a token and layer."""
    found = facts(str(folder), "--dtype", "float32")
    assert found["layers keep"] == "3 of them keys and values (160 B a token)"
    longest = read_model_config(folder, model="m").max_model_len
    assert f"{480 * longest / 1024:.1f} KiB for {longest:,} tokens" in str(found["memory of a context"])


def test_a_checkpoint_that_does_not_run_is_described(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    changed = {**settings, "architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    found, known = facts(str(tmp_path)), facts(str(folder))
    assert found["architecture"] == "T5ForConditionalGeneration"
    assert str(found["runs here"]).startswith("no: ")
    assert found["tensors"] == known["tensors"]
    assert found["weights"] == str(known["weights"]).split("; ")[0]


def test_an_embedding_in_floats_is_in_memory(tmp_path: Path) -> None:
    """Beside a head in blocks: only of an embedding in blocks are rows read from the file."""
    case = next(case for case in TINY_MODELS if case.name == "llama")
    replace(case, settings={**case.settings, **SIZES}).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf", "Q8_0", as_floats=("token_embd.weight",))
    expected = weights_bytes(empty_model(read_model_config(file, model="m", dtype="bfloat16")))
    assert f"in these blocks on a CPU, {expected / 1024:.1f} KiB in memory" in str(facts(str(file))["weights"])
