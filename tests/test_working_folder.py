"""A file in the working folder is never run in place of a module, neither by children nor by `python -m octavo...`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.breadth import pick

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.config.args import EngineArgs
from octavo.executor.multiproc import MultiprocExecutor
from octavo.working_folder import child_command, child_environment

SHADOWS = ("sitecustomize", "typing", "random", "queue", "zmq", "msgspec", "numpy", "torch", "llguidance", "typer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, full of files that say that they were run."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r}); raise SystemExit(9)"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_children(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "."]))
    choice = StructuredOutput(choice=["left", "right"])
    ranks = pick({}, {"tensor_parallel_size": 2})  # by default below, without a model: each would import torch
    with LLM("demo", engine_process=True, num_kv_blocks=64, **ranks) as llm:
        [output] = llm.generate("Go", SamplingParams(max_tokens=8, structured_output=choice), use_tqdm=False)
    assert output.outputs[0].text in ("left", "right")
    executor = MultiprocExecutor(EngineArgs(tensor_parallel_size=2).resolve(), "octavo.testing:FakeRank")
    executor.start()
    executor.exit()
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("start", [["-m", "octavo.cli.main"], ["-moctavo.cli.main"]])
def test_the_program(folder: Path, start: list[str]) -> None:
    done = subprocess.run([sys.executable, *start, "--version"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["octavo"]), done.stderr
    assert not (folder / "ran").exists()


def test_what_a_child_finds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named entry of PYTHONPATH, and the module that it is asked to import; both may be in the working folder."""
    (folder / "lib").mkdir()
    (folder / "lib" / "named.py").write_text("")
    (folder / "mine.py").write_text("import named, random\ndef main(): return 'random' in random.__file__ and 3")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "lib"), "./"]))
    command = child_command("mine", also_imports="mine")
    assert child_environment()["PYTHONPATH"] == str(folder / "lib")
    done = subprocess.run(command, env=child_environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert not (folder / "ran").exists()


def test_a_child_ignores_signals_that_all_processes_get_while_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text("import signal\nfor n in (2, 15): signal.raise_signal(n)\ndef main(): return 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = child_command("slow", also_imports="slow")
    done = subprocess.run(command, env=child_environment(), check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
