"""Every benchmark still starts: its module is imported, and it parses its options. One runs with its smallest."""

import importlib
import json
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
    assert capsys.readouterr().out.startswith("usage: ")


def test_what_a_step_costs_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    monkeypatch.setattr(sys, "argv", ["step_cost", "--running", "2", "--steps", "4", "--json", str(out)])
    step_cost.main()
    costs = json.loads(out.read_text())
    assert {cost["num_running"] for cost in costs} == {2}
    assert all(cost["median_us"] > 0 for cost in costs)
