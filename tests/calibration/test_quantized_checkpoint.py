"""`octavo convert --quantize`: checkpoints that load like any other, nearer to the model than `--quantization`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from benchmarks.quality import Subject, compare, log_probabilities
from benchmarks.quality_texts import demo_answers
from safetensors.torch import load_file
from tests.breadth import pick
from tests.convert.test_convert import save
from tests.distributed.ranks import run_ranks
from tests.gguf.files import convert as write_gguf
from tests.models.paged import PagedRunner, load
from tests.models.test_family import CASES
from typer.testing import CliRunner

from octavo import LLM, SamplingParams
from octavo.calibration.quantize import BitsPlan, passages_of, quantize, read_text
from octavo.cli import checkpoints
from octavo.config.hub import resolve_model
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.distributed.groups import ParallelGroups
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.kernels.dispatch import native_kernels
from octavo.kernels.quantization import get_quantization
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.octavo import FORMS
from octavo.tokenizer.tokenizer import Tokenizer

app = typer.Typer()
app.command()(checkpoints.convert)

TOKENS = [5, 9, 33, 60, 4]
PASSAGES = [[number * 7 % 50 for number in range(start, start + 40)] for start in range(4)]
needs_kernels = pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels were not built")


def logits_of(path: Path, dtype: str = "float32", groups: ParallelGroups | None = None) -> torch.Tensor:
    return PagedRunner(load(path, dtype=dtype, groups=groups)).step({0: TOKENS})[0]


@pytest.fixture(scope="module")
def demo_int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made with a part of the text: it takes as long as there are tokens."""
    folder = tmp_path_factory.mktemp("demo")
    out, text = folder / "int4", folder / "text.txt"
    text.write_text(read_text(None)[: pick(1000, None)], encoding="utf-8")
    arguments = ["demo", str(out), "--quantize", "int4", "--bits-for", "v_proj=8", "--calibration-text", str(text)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "4.92 bits per quantized weight" in done.output
    return out


@needs_kernels
def test_it_is_nearer_to_the_model_than_what_is_made_at_load(demo_int4: Path) -> None:
    samples = list(demo_answers(1))
    expected = [log_probabilities(Subject("demo").load("float32"), sample) for sample in samples]
    models = [load(demo_int4, dtype="bfloat16"), Subject("demo").load(quantization=get_quantization("int4"))]
    calibrated, made_at_load = (
        compare(expected, [log_probabilities(model, sample) for sample in samples])["kl"] for model in models
    )
    assert calibrated < made_at_load


@needs_kernels
def test_kernels_compute_with_the_stored_integers(demo_int4: Path) -> None:
    assert FORMS[4] == get_quantization("int4").linear  # and so at the same speed
    model = load(demo_int4, dtype="bfloat16")
    linears = [part for part in model.modules() if isinstance(part, MergedLinear)]
    assert not any(part.is_compressed for part in linears)
    torch.testing.assert_close(PagedRunner(model).step({0: TOKENS})[0], logits_of(demo_int4), atol=0.5, rtol=0.1)


@needs_kernels
def test_a_request_has_its_bytes_in_any_batch(demo_int4: Path) -> None:
    llm = LLM(str(demo_int4), max_model_len=128, max_num_seqs=4)
    prompts = ["What is 3 + 4?", "Hello", "Spell cat backwards.", "Which is larger, 7 or 12?"]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == answer.outputs[0].token_ids
    llm.exit()


def test_more_bits_for_a_layer_are_for_all_that_is_computed_with_it(demo_int4: Path) -> None:
    settings = json.loads((demo_int4 / "config.json").read_text())["quantization_config"]
    tensors = load_file(demo_int4 / "model.safetensors")
    assert settings["bits"] == 4
    for part in ("q", "k", "v"):
        assert settings["bits_for"][f"model.layers.0.self_attn.{part}_proj"] == 8
        assert tensors[f"model.layers.0.self_attn.{part}_proj.qweight"].dtype == torch.int8
    assert tensors["model.layers.0.mlp.down_proj.qweight"].dtype == torch.uint8
    assert "lm_head.qweight" in tensors


def test_ranks_compute_with_their_shards(demo_int4: Path) -> None:
    whole = logits_of(demo_int4)
    results = run_ranks(lambda groups: logits_of(demo_int4, groups=groups), 2)
    for found in results:
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def save_stacked(folder: Path) -> Path:
    CASES["qwen3-moe"].build().save_pretrained(folder, save_original_format=False)
    return folder


@pytest.mark.parametrize(
    "save_model",
    [
        lambda folder: write_gguf(save("qwen3-tied-gqa-8", folder / "saved"), folder / "model.gguf"),
        lambda folder: save("qwen2-moe", folder),
        save_stacked,
    ],
    ids=["gguf, tied", "experts, one of them shared", "stacked experts"],
)
def test_every_tensor_is_in_its_place(save_model: Callable[[Path], Path], tmp_path: Path) -> None:
    """With 8 bits, the logits are nearly those of the source; in 4 bits a tiny model has others."""
    source, out = save_model(tmp_path / "source"), tmp_path / "out"
    found = quantize(Checkpoint.open(str(source)), BitsPlan(bits=8), PASSAGES, shows_progress=False)
    convert(found, out, "safetensors", TargetOptions())
    expected = logits_of(source)
    assert float((logits_of(out) - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "int3"], "quantize"),
        (["--quantize", "int4", "--bits-for", "down_proj"], "NAME=BITS"),
        (["--quantize", "int4", "--bits-for", "down_proj=5"], "one of 4, 8"),
        (["--quantize", "int4", "--bits-for", "no_such=8"], "no_such"),
        (["--quantize", "int4", "--calibration-text", "/no/such/file"], "calibration_text"),
        (["--bits-for", "down_proj=8"], "only with --quantize"),
    ],
)
def test_what_cannot_be_is_said_before_the_work(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        CliRunner().invoke(app, ["demo", str(tmp_path / "out"), *arguments], catch_exceptions=False)
    assert not (tmp_path / "out").exists()


def test_weights_are_not_quantized_twice(demo_int4: Path) -> None:
    with pytest.raises(InvalidParameterError, match="quant_method octavo"):
        quantize(Checkpoint.open(str(demo_int4)), BitsPlan(), PASSAGES, shows_progress=False)


def test_a_short_text_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="at least 64 tokens"):
        passages_of("Too short.", Tokenizer.from_path(resolve_model("demo")))


def test_newer_checkpoints_are_refused(demo_int4: Path, tmp_path: Path) -> None:
    settings = json.loads((demo_int4 / "config.json").read_text())
    settings["quantization_config"]["version"] = 2
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="version=2"):
        load(tmp_path)
