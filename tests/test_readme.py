"""Every block of the README runs as it is printed, and alone.

`python` and `sh` blocks run here, `py` in tests/clients, where there is a client; what is indented is for `make` and
pip. Only the server's address is replaced, as port 8000 may be taken. Outside of full breadth what needs no server runs
in the tests' process, and engines of `AsyncLLM` have a fake model: a dozen processes would take 25 CPU seconds to
import torch.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.fakes import CORE
from tests.server.http_server import HttpServer
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.engine.process_client import ProcessClient

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def sh(script: str, folder: Path) -> str:
    """Run a block in a folder of its own, with `octavo` on the path; every line must succeed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False, cwd=folder,
        env=os.environ | {"PATH": path}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_this_process(script: str, folder: Path) -> str:
    """Run a block of which each line is `octavo ...` or `echo ... | octavo ...`, with engines in this process."""
    shown = ""
    for line in script.splitlines():
        *echo, (name, command, *arguments) = pipe(line)
        assert (name, [first for first, *_ in echo]) in (("octavo", ["echo"]), ("octavo", []))
        text = "".join(f"{' '.join(words)}\n" for _, *words in echo)
        apart = ["--no-engine-process"] if command in ("generate", "chat") else []
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            done = CliRunner().invoke(app, [command, *apart, *arguments], input=text, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        shown += done.stdout
    return shown


def pipe(line: str) -> list[list[str]]:
    """Return the words of each program of a pipe."""
    words = " ".join("|" if word == "|" else shlex.quote(word) for word in shlex.split(line, comments=True))
    return [shlex.split(program) for program in words.split(" | ")]


@pytest.mark.parametrize("number", range(3))
def test_python_runs(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = blocks("python")
    assert len(programs) == 3
    if pick(False, True):
        subprocess.run([sys.executable, "-c", programs[number]], check=True, cwd=tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(ProcessClient, "command", CORE)
        exec(compile(programs[number], "README", "exec"), {"__name__": "__main__"})
    assert ("Octavo is -> " in capfd.readouterr().out) == (number == 0)


def test_commands_run(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(Path(__file__).parent.parent / "docs")  # commands are typed in a clone
    (script,) = [block for block in blocks("sh") if "octavo env" in block]
    assert "keys and values" in pick(in_this_process, sh)(script, tmp_path)


def test_the_server_and_what_talks_to_it(tmp_path: Path) -> None:
    (start,) = [block for block in blocks("sh") if "octavo serve" in block]
    assert start.startswith("octavo serve demo  ")
    clients = [block for block in blocks("sh") if ADDRESS in block]
    assert len(clients) == 2
    with HttpServer(model=start.split()[2], has_model=RUNS_ALL) as server:
        shown = [sh(block.replace(ADDRESS, server.url), tmp_path) for block in clients]
        assert "data: [DONE]" in shown[0]
        assert "keys and values" in shown[1] or not RUNS_ALL
        assert (tmp_path / "run.svg").stat().st_size > 1000


def test_what_is_indented_is_for_make_and_pip() -> None:
    rest = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert {line.split()[0] for line in re.findall("^    .*", rest, re.MULTILINE)} == {
        "make", "python3", ".venv/bin/pip"
    }  # fmt: skip
