"""`octavo lora inspect`, `octavo convert --merge-lora` and `octavo bench --num-adapters` on real files."""

import json
from pathlib import Path

import pytest
from tests.server.test_lora import write_adapter
from typer.testing import CliRunner

from octavo import LLM, LoRARequest, SamplingParams
from octavo.cli.main import app

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "queries")


def test_inspect_says_what_an_adapter_is(adapter: Path) -> None:
    told = json.loads(run("lora", "inspect", str(adapter), "--model", "demo", "--json"))
    assert told["kind"] == "LoRA, rank 4, alpha 8"
    assert (told["modules"], told["fits"], len(told["content hash"])) == ("6 q_proj", "demo", 64)
    assert "queries" in run("lora", "inspect", str(adapter))


@pytest.mark.parametrize(("width", "kind", "why"), [(128, "LORA", "shape [4, 256] is expected"), (256, "LOHA", "LOHA")])
def test_inspect_says_why_one_is_refused(
    tmp_path: Path, width: int, kind: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "odd", width=width)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": kind}))
    result = CliRunner().invoke(app, ["lora", "inspect", str(folder), "--model", "demo"])
    assert result.exit_code == 2
    assert why in result.output + capfd.readouterr().err


def test_a_merged_checkpoint_says_what_the_adapter_says(adapter: Path, tmp_path: Path) -> None:
    run("convert", "demo", str(tmp_path / "merged"), "--dtype", "float32", "--merge-lora", str(adapter))
    prompts = ["Hello", "What is 2 + 3?", "Octavo is"]
    with LLM("demo", dtype="float32", enable_lora=True) as llm:
        base = [output.text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        request = LoRARequest("queries", 1, adapter)
        adapted = [output.text for output in llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=request)]
    with LLM(str(tmp_path / "merged"), dtype="float32") as llm:
        merged = [output.text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert merged == adapted
    assert merged != base


def test_merging_needs_dense_weights_that_the_adapter_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    misfit = write_adapter(tmp_path / "misfit", width=128)
    result = CliRunner().invoke(app, ["convert", "demo", str(tmp_path / "out"), "--merge-lora", str(misfit)])
    assert result.exit_code == 2
    assert "q_proj" in result.output + capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bench_uses_adapters_in_turn() -> None:
    sizes = (
        "--num-prompts",
        "3",
        "--input-len",
        "4",
        "--output-len",
        "2",
        "--num-adapters",
        "2",
        "--adapter-rank",
        "4",
    )
    report = json.loads(run("bench", "throughput", "--model", "demo", *sizes, "--json").splitlines()[-1])
    assert (report["num_adapters"], report["adapter_rank"]) == (2, 4)
