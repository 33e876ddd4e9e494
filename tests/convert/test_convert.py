"""`octavo convert`: what it writes is the same model, for Octavo and for transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from tests.breadth import pick
from tests.gguf.files import convert as write_gguf
from tests.loader.quantized_files import gptq, save_pair
from tests.models.paged import PagedRunner, load
from tests.models.tiny import TINY_MODELS
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from octavo.cli import checkpoints
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

app, inspect_app = typer.Typer(), typer.Typer()
app.command()(checkpoints.convert)
inspect_app.command()(checkpoints.inspect)

TOKENS = [5, 9, 33, 60, 4]
FAMILIES = ["llama", "mixtral", "qwen2-moe", "qwen3-tied-gqa-8"]


def save(name: str, folder: Path) -> Path:
    next(case for case in TINY_MODELS if case.name == name).save(folder)
    return folder


def logits_of(path: Path, dtype: str = "float32") -> torch.Tensor:
    return PagedRunner(load(path, dtype=dtype)).step({0: TOKENS})[0]


def converted(source: Path, out: Path, *arguments: str) -> Path:
    done = CliRunner().invoke(app, [str(source), str(out), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{out}: ")
    return out


@pytest.mark.parametrize("to", ["safetensors", "pt"])
def test_it_is_the_same_model_in_shards_too(to: str, tmp_path: Path) -> None:
    source = save("qwen3", tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    expected = logits_of(source)
    whole = converted(source, tmp_path / "whole", "--to", to)
    shards = converted(source, tmp_path / "shards", "--to", to, "--max-shard-gib", "1e-5")
    assert len(list(shards.glob("*.index.json"))) == 1
    assert not list(shards.glob("*.part"))
    for folder in (whole, shards):
        assert torch.equal(logits_of(folder), expected)
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "for tools"
    back = converted(shards, tmp_path / "back")
    ours, theirs = load_file(back / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", FAMILIES[:: pick(2, 1)])
def test_gguf_files_become_checkpoints_of_transformers(name: str, tmp_path: Path) -> None:
    source = write_gguf(save(name, tmp_path / "saved"), tmp_path / "model.gguf")
    out = converted(source, tmp_path / "out", "--dtype", "float32")
    assert torch.equal(logits_of(out), logits_of(source))
    model = AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(out), expected, atol=1e-4, rtol=1e-4)


def test_a_dtype_is_that_of_tensors_and_settings(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "source")
    out = converted(source, tmp_path / "out", "--dtype", "bfloat16")
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(logits_of(out, "bfloat16"), logits_of(source, "bfloat16"))


def test_a_head_that_the_settings_tie_wrongly_is_kept_and_they_are_mended(tmp_path: Path) -> None:
    source = save("qwen3", tmp_path / "source")
    expected = logits_of(source)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    out = converted(source, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits_of(out), expected)
    shown = CliRunner().invoke(inspect_app, [str(source), "--json"], catch_exceptions=False)
    assert json.loads(shown.stdout)["logits head"] == "its own"


def test_quantized_weights_stay_as_they_are(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
    save_pair(tmp_path, settings, lambda layer: True, gptq(4, 64, is_symmetric=True))
    source = tmp_path / "quantized"
    out = converted(source, tmp_path / "out", "--to", "pt")
    assert torch.equal(logits_of(out), logits_of(source))
    with pytest.raises(InvalidParameterError, match=r"dtype='float16': auto: .* quantized \(quant_method gptq\)"):
        Checkpoint.open(str(source), dtype="float16")


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    checkpoint, options = Checkpoint.open(str(source)), TargetOptions()
    with pytest.raises(InvalidParameterError, match="nothing is overwritten"):
        convert(checkpoint, source, "safetensors", options)
    with pytest.raises(InvalidParameterError, match="tensor_parallel_size=2: unset: it has no effect on pt"):
        convert(checkpoint, tmp_path / "out", "pt", TargetOptions(tensor_parallel_size=2))
    with pytest.raises(InvalidParameterError, match="to='zip': one of safetensors, pt"):
        convert(checkpoint, tmp_path / "out", "zip", options)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="truncated or malformed"):
        convert(checkpoint, tmp_path / "out", "safetensors", options)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_quantized_on_the_way_it_is_divided_or_refused_as_quantized(tmp_path: Path) -> None:
    """As `octavo convert --quantize` does: only what is written is quantized."""
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    written = replace(
        Checkpoint.open(str(save("llama", tmp_path / "source"))), settings={"quantization_config": settings}
    )
    assert written.model.quantization is None
    assert written.written_model.quantization is not None
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be written as gguf: weights are quantized \(quant_method fp8"
    ):
        convert(written, tmp_path / "model.gguf", "gguf", TargetOptions())
    with pytest.raises(CheckpointError, match=r"dtype torch\.float32 cannot be loaded as weights"):
        convert(written, tmp_path / "out", "sharded_state", TargetOptions())
