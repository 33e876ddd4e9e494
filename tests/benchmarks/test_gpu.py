"""The GPU benchmark runs from end to end on a CPU, with tiny sizes, and one section's failure is that section's."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import run, sections, tiles
from benchmarks.gpu.cases import Case, measure_all
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.plan import DRY, Plan
from benchmarks.gpu.report import Finding, Report, read_findings

ROOT = Path(__file__).parent.parent.parent
# All that a machine may lack on which the benchmark runs. None stands for a module that cannot be imported.
ABSENT = """
    fastapi huggingface_hub jinja2 llguidance nanobind prometheus_client pydantic rich tokenizers tqdm
    transformers typer uvicorn uvloop yaml zmq
"""
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT.split()}))
from benchmarks.gpu import run
sys.exit(run.main())
"""


@pytest.mark.full
def test_every_section_runs_on_a_machine_that_has_little(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "--dry-run", "--in-process", "--json", str(tmp_path / "found.json")]
    command += ["--only", *run.NAMES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [Finding(**entry) for entry in json.loads((tmp_path / "found.json").read_text())]
    assert [finding.section for finding in findings if finding.value == "done"] == [*run.NAMES]
    names = {finding.name for finding in findings}
    assert {f"{op}, tiny T=3" for op in ("edit", "draw", "draw, filtered", "rate")} <= names
    assert {"read bandwidth", "graphs = op by op", "tiny b1", "tiny b3 drawn", "tiny b1 price"} <= names
    assert sum(finding.is_right is True for finding in findings) > 20
    assert "== decode" in done.stdout


def test_sections_are_those_that_can_be_named() -> None:
    assert tuple(sections.SECTIONS) == run.NAMES


def test_a_section_that_fails_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(plan: Plan, report: Report, limits: Limits) -> None:
        report.add("first", 1.0, "us")
        raise ValueError("no more")

    monkeypatch.setitem(sections.SECTIONS, "prefill", half)
    path = tmp_path / "findings"
    run.run_here("prefill", path, is_dry=True)
    first, end = read_findings(path)
    assert (first.name, first.value) == ("first", 1.0)
    assert end.value == "failed"
    assert "ValueError: no more" in end.note


def test_a_section_that_hangs_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "findings"
    run.run_apart("machine", path, 0.01, is_dry=True)
    (end,) = read_findings(path)
    assert end.value == "failed"
    assert "cut off" in end.note


def test_shares_of_the_roofline_are_of_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "findings"
    Report("machine", path).add("read bandwidth", 4000.0, "GB/s")
    assert Limits.of(read_findings(path)).share(1.0, 1.0) is None
    Report("machine", path).add("matmul rate, bf16", 800.0, "T/s")
    limits = Limits.of(read_findings(path))
    assert limits.share(2.0, 4e12) == pytest.approx(0.5)
    assert limits.share(2.0, 4e12, 1.6e15) == pytest.approx(1.0)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "findings"
    Report("machine", path).add("whole", 1.0)
    with path.open("a") as file:
        file.write('{"section": "mach')
    assert [finding.name for finding in read_findings(path)] == ["whole"]


@pytest.mark.parametrize(("is_exact", "off_by", "is_right"), [(True, 0, True), (True, 1, False), (False, 1, True)])
def test_what_must_be_exact_is_wrong_by_one_id(is_exact: bool, off_by: int, is_right: bool, tmp_path: Path) -> None:
    ids = torch.tensor([7, 150_000])
    case = Case(name="ids", run=lambda: ids, define=lambda: ids + off_by, num_bytes=1.0, is_exact=is_exact)
    limits, path = Limits(bytes_per_s=None, operations_per_s=None), tmp_path / "findings"
    measure_all(iter([case]), "here", Report("kernels", path), limits, torch.device("cpu"), torch.float32)
    assert [finding.is_right for finding in read_findings(path)] == [is_right]


@pytest.mark.full
def test_weights_in_few_bits_are_compared_with_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
    plan, path = replace(DRY, batches=(3,), max_num_batched_tokens=20), tmp_path / "findings"
    sections.SECTIONS["low_bit"](plan, Report("low_bit", path), Limits(bytes_per_s=1.0, operations_per_s=1.0))
    findings = {finding.name: finding for finding in read_findings(path)}
    for name in ("linear gate_up, int8", "linear down, int4", "linear down, fp8", "adapters of rank 16"):
        assert findings[f"{name}, tiny T=3"].is_right
    for name in ("float32", "int8", "int4", "fp8"):
        for num_rows in (3, 20):
            assert findings[f"experts, {name}, tiny-moe T={num_rows}"].is_right


def test_tiles_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the interpreter: the whole program takes half a minute, one part a second."""
    monkeypatch.setattr(sys, "argv", ["tiles", "--dry-run", "--only", "one_row"])
    assert tiles.main() == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("one row tiny: floor")
    assert "* " in line
    assert line.count(" w") == 1 + 4


def test_other_bits_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    contest = tiles.Contest("linear", 1.0, [tiles.Candidate("a", lambda: lambda: None)], are_equal=True)
    results = {"a": torch.ones(2), "b": torch.ones(2), "cublas": torch.zeros(2)}
    assert tiles._show(contest, {"a": 1.0, "b": 2.0}, results)
    assert "same bits, not cublas" in capsys.readouterr().out
    assert not tiles._show(contest, {"a": 1.0}, {**results, "b": torch.zeros(2)})
    assert "OTHER BITS" in capsys.readouterr().out
