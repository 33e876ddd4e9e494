"""What a comparison says must follow from what was measured, whoever is compared."""

from pathlib import Path

import pytest
from benchmarks.geometry import QWEN3_0_6B
from benchmarks.machine.probe import Machine, best_of, speedup
from benchmarks.peers import compare
from benchmarks.peers.cells import Arrivals, Capacity, Cell, Engine, measure, steady_rate
from benchmarks.peers.ik_llama_cpp_peer import arguments, rates
from benchmarks.peers.registry import IK_LLAMA_CPP, LLAMA_CPP, PeerMissingError
from benchmarks.peers.roofline import limit, memory_bytes
from benchmarks.peers.tables import tables

MACHINE = Machine(bytes_per_s=32e9, float32_per_s=7e11, bf16_per_s=7.5e12, int8_per_s=15e12)


class OneTokenPerSecond(Engine):
    """Request n gets its first token after n seconds, then one each second."""

    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        return [[float(1 + number + step) for step in range(num_out)] for number in range(len(prompts))]


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_decode_counts_the_stretch_in_which_all_decode(num_requests: int) -> None:
    cell = Cell.parse(f"decode:{num_requests}:128")
    assert measure(OneTokenPerSecond(), cell) == pytest.approx(num_requests)


def test_a_slow_prefill_does_not_show_in_decode() -> None:
    fast = [1.0 + 0.5 * step for step in range(64)]
    late = [20.0 + 0.5 * step for step in range(64)]
    assert steady_rate([fast, late]) == pytest.approx(4.0)


def test_prefill_is_prompt_over_time_to_first_token() -> None:
    assert measure(OneTokenPerSecond(), Cell.parse("prefill:1024")) == 1024


@pytest.mark.parametrize("text", ["decode:8", "prefill", "prefill:1:2", "start"])
def test_a_misspelt_cell_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Cell.parse(text)


def test_prompts_are_the_same_in_every_engine() -> None:
    assert Cell.parse("decode:8:128").prompts() == Cell.parse("decode:8:128").prompts()
    assert [len(prompt) for prompt in Cell.parse("decode:8:128").prompts()] == [128] * 8


def test_ceilings_are_those_of_the_arithmetic() -> None:
    """596 million weights over 32 GB/s; their products and the attention of 1,024 tokens over 7.5 T/s."""
    assert limit(QWEN3_0_6B, Cell.parse("decode:1:128"), "bf16", 2, MACHINE) == pytest.approx(26.4, abs=0.1)
    assert limit(QWEN3_0_6B, Cell.parse("decode:1:128"), "int8", 2, MACHINE) == pytest.approx(52.0, abs=0.2)
    assert limit(QWEN3_0_6B, Cell.parse("prefill:1024"), "bf16", 2, MACHINE) == pytest.approx(7512, abs=1)


def test_memory_counts_weights_keys_values_and_half_a_gigabyte() -> None:
    capacity = Capacity.of([Cell.parse("decode:32:128")])
    assert memory_bytes(QWEN3_0_6B, "bf16", 2, capacity) == pytest.approx(1.192e9 + 0.7047e9 + 0.5e9, rel=1e-3)


def test_the_better_probe_counts_and_a_busy_machine_shows() -> None:
    half = Machine(bytes_per_s=33e9, float32_per_s=3e11, bf16_per_s=4e12, int8_per_s=7e12)
    one = Machine(bytes_per_s=16e9, float32_per_s=3e11, bf16_per_s=3.8e12, int8_per_s=7e12)
    best = best_of({1: one, 2: MACHINE}, {1: one, 2: half})
    assert (best[2].bytes_per_s, best[2].bf16_per_s) == (33e9, 7.5e12)
    assert speedup({1: one, 2: half}) < 1.1 < speedup(best)


def make_row(engine: str, rate: float | None) -> dict[str, object]:
    medians = {} if rate is None else {"decode:1:128": rate, "start_s": 1.0, "peak_bytes": 2e9}
    failure = "told much\nnot there" if rate is None else None
    row = {"engine": engine, "precision": "bf16", "group": "bf16", "failure": failure, "medians": medians}
    return {**row, "failed_cells": {}, "limits": {"decode:1:128": 25.0}, "memory_bytes": 2e9}


def test_table_shows_the_ratio_to_the_best_peer_and_who_failed() -> None:
    rows = [make_row("octavo", 20.0), make_row("slow", 5.0), make_row("good", 10.0), make_row("absent", None)]
    text = tables({"machine": {}, "speedup": 2.0, "cells": ["decode:1:128"], "rows": rows})
    assert "| octavo bf16 | 20.0 (80%) |" in text
    assert "| 0.00085 |" in text  # nats, of benchmarks/results
    assert "| good bf16 | 10.0 (40%) | 1.00 | 2,000 (100%) | not measured |" in text
    assert "| Octavo over the best peer | 2.00 |" in text
    assert "absent bf16: not there" in text


def test_a_cell_that_failed_is_left_out_and_told_why() -> None:
    ours = {**make_row("octavo", 20.0), "limits": {"decode:1:128": 25.0, "decode:1:8192": 20.0}}
    theirs = {**make_row("slow", 5.0), "limits": ours["limits"], "failed_cells": {"decode:1:8192": "told\nout of time"}}
    cells = ["decode:1:128", "decode:1:8192"]
    text = tables({"machine": {}, "speedup": 2.0, "cells": cells, "rows": [ours, theirs]})
    assert "| slow bf16 | 5.0 (20%) | - |" in text
    assert "| Octavo over the best peer | 4.00 | - |" in text
    assert "- slow bf16, decode:1:8192: out of time" in text


@pytest.mark.parametrize("has_plots", [False, True])
def test_a_report_says_before_the_run_what_it_will_lack(
    has_plots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "HAS_PLOTS", has_plots)
    compare.check_out(tmp_path / "report")
    assert ("report.svg will not be written" in capsys.readouterr().err) is not has_plots
    with pytest.raises(NotADirectoryError, match="absent"):
        compare.check_out(tmp_path / "absent" / "report")


def test_a_report_without_matplotlib_has_numbers_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "HAS_PLOTS", False)
    found = {"machine": {}, "speedup": 2.0, "cells": ["decode:1:128"], "rows": [make_row("octavo", 20.0)]}
    compare.write(found, tmp_path / "report")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_a_context_that_fails_leaves_the_other_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_process(row: compare.Row, model: Path, cells: list[str], timeout_s: float) -> dict[str, float]:
        if cells == ["decode:1:8192"]:
            raise RuntimeError("out of memory")
        return dict.fromkeys(cells, 3.0) | {"start_s": 1.0, "peak_bytes": 2e9}

    monkeypatch.setattr(compare, "run_process", run_process)
    row = compare.Row(peer=LLAMA_CPP, group="int8", precision="q8_0")
    compare.run_again(row, tmp_path, ["decode:1:128", "decode:1:2048", "decode:1:8192"], 1.0)
    assert row.medians() == {"decode:1:128": 3.0, "start_s": 1.0, "peak_bytes": 2e9, "decode:1:2048": 3.0}
    assert row.failed_cells == {"decode:1:8192": "out of memory"}


def test_a_peer_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("BENCHMARK_PEERS", str(tmp_path))
    with pytest.raises(PeerMissingError, match=r"benchmarks\.peers\.install llama\.cpp"):
        LLAMA_CPP.python()


def test_the_program_of_ik_llama_cpp_is_named_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IK_LLAMA_CPP", raising=False)
    with pytest.raises(PeerMissingError, match=r"IK_LLAMA_CPP names no program"):
        IK_LLAMA_CPP.python()


def test_the_table_of_ik_llama_cpp_is_read(tmp_path: Path) -> None:
    output = [
        "|   128 |     64 |    8 |    640 |    0.500 |   256.00 |   10.240 |    50.00 |   10.740 |    59.59 |",
        "told",
    ]
    assert list(rates(iter(output), "decode")) == [50.0]
    assert list(rates(iter(output), "prefill")) == [256.0]
    text = " ".join(arguments(tmp_path / "q8_0.gguf", Cell.parse("decode:8:128"), 2, 3))
    assert "-npp 128 -ntg 64 -npl 8,8 -pps -c 768 " in text
