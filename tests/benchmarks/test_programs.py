"""Every benchmark still starts: its module is imported, and it parses its options. One makes a step."""

import importlib
import sys
from pathlib import Path

import pytest
from benchmarks.host import step_cost
from tests.breadth import each

ROOT = Path(__file__).parent.parent.parent
# Of benchmarks/peers, whose programs need other projects, test_peers.py has what needs none.
NAMES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if path.name != "__init__.py" and path.parent.name != "peers"
]
PROGRAMS = [name for name in NAMES if "def main(" in (ROOT / f"{name.replace('.', '/')}.py").read_text("utf-8")]


@each("name", NAMES)
def test_modules_are_imported(name: str) -> None:
    importlib.import_module(name)


@each("name", PROGRAMS)
def test_programs_say_what_their_options_are(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_a_step_whose_cost_is_measured() -> None:
    case = step_cost.Case(num_running=2, num_waiting=3, context=100, turnover=False, aligned=False)
    scheduler = step_cost.fill(case, 4)
    scheduler_output = scheduler.schedule()
    outputs = scheduler.update_from_output(scheduler_output, step_cost.model_output(scheduler_output))
    assert len(outputs.new_token_ids) == case.num_running
