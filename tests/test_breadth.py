"""No test is left out by mistake: each belongs to a part of `make test-all`, and every seeded fault still applies."""

import sys
from pathlib import Path

import pytest
from tests.breadth import each
from tests.order import LONG
from tools import test_all
from tools.seeded_faults.__main__ import StaleFaultError, find
from tools.seeded_faults.faults import FAULTS, Fault
from tools.test_all import PARTS, ROOT, Part, files_of, in_turns, parts_for, run_within

APART = ("tests/clients/", "tests/ray/", "tests/ui/")  # environments of their own: `make test-clients`, `make test-ray`


def paths(folder: str, pattern: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in Path(ROOT / folder).rglob(pattern)]


def test_every_test_belongs_to_a_part() -> None:
    listed = {file for part in PARTS.values() for file in files_of(part)}
    assert listed == {path for path in paths("tests", "test_*.py") if not path.startswith(APART)}


def test_every_package_asks_for_a_part() -> None:
    packages = {path.split("/")[2] for path in paths("src/octavo", "*.py") if path.count("/") > 2}
    assert [package for package in packages if not parts_for([f"src/octavo/{package}/any.py"])] == []


def test_a_change_asks_for_what_looks_at_it() -> None:
    assert parts_for(["src/octavo/kernels/cpu/ops.h"]) == ["kernels", "sanitizers"]
    assert parts_for(["tests/kernels/triton/test_draw.py"]) == ["triton"]
    assert parts_for(["README.md"]) == []
    assert parts_for(["tests/breadth.py"]) == list(PARTS)


def test_what_a_budget_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    endless = Part(command=("sleep", "1000"), sources=())  # not Python: interrupted as it starts, it ends as tests fail
    broken = Part(command=(sys.executable, "-c", "raise SystemExit(3)"), sources=())
    monkeypatch.setattr(test_all, "PARTS", {"endless": endless, "broken": broken})
    assert run_within(["endless", "broken"], 0.1) == 0
    assert "endless was cut short, without a failure so far; not run: broken" in capfd.readouterr().out
    assert run_within(["broken", "endless"], 1000.0) == 3


def test_each_part_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, expected in (("6", ["a", "b", "c"]), ("7", ["b", "c", "a"]), ("8", ["c", "a", "b"])):
        monkeypatch.setattr(test_all, "_git", lambda *arguments, count=count: count)
        assert in_turns(["a", "b", "c"]) == expected


def test_files_that_go_first_exist() -> None:
    assert [file for file in LONG if not (ROOT / file).exists()] == []


def test_a_value_that_fails_is_named() -> None:
    @each("num_rows", [1, 2, 3])
    @each(("low", "high"), [(1, 2), (3, 4)])
    def check(num_rows: int, low: int, high: int) -> None:
        assert (num_rows, low, high) != (2, 3, 4)

    with pytest.raises(AssertionError) as failure:
        check()
    assert failure.value.__notes__ == ["with low=3, high=4", "with num_rows=2"]


def test_every_seeded_fault_applies() -> None:
    """Where code has changed its wording, mend the fault in tools/seeded_faults/faults.py."""
    assert len(FAULTS) >= 20
    for fault in FAULTS:
        path = find(fault, ROOT)
        if path.suffix == ".py":  # tests cannot notice what Python does not read
            compile(path.read_text().replace(fault.right, fault.wrong), fault.name, "exec")
    with pytest.raises(StaleFaultError, match="stands 0 times"):
        find(Fault(name="stale", right="no such text", wrong="", tests=""), ROOT)
