"""Every block of the README runs as it is printed, and alone.

`python` and `sh` blocks run here, `py` in tests/clients, where there is a client; what is indented is for `make` and
pip. Only the server's address is replaced, as port 8000 may be taken.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.server.http_server import HttpServer

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
ALONE = """import sys
for block in sys.stdin.read().split("\\0"):
    exec(compile(block, "README", "exec"), {"__name__": "__main__"})"""


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


def test_python_runs(tmp_path: Path) -> None:
    """In one process, which takes its seconds to start, but each block with names of its own."""
    programs = blocks("python")
    assert len(programs) == 3
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, input="\0".join(programs), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Octavo is -> " in done.stdout


def test_commands_run(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(Path(__file__).parent.parent / "docs")  # commands are typed in a clone
    (script,) = [block for block in blocks("sh") if "octavo env" in block]
    assert "keys and values" in sh(script, tmp_path)


def test_the_server_and_what_talks_to_it(tmp_path: Path) -> None:
    (start,) = [block for block in blocks("sh") if "octavo serve" in block]
    assert start.startswith("octavo serve demo  ")
    clients = [block for block in blocks("sh") if ADDRESS in block]
    assert len(clients) == 2
    with HttpServer(model=start.split()[2]) as server:
        shown = [sh(block.replace(ADDRESS, server.url), tmp_path) for block in clients]
        assert "data: [DONE]" in shown[0]
        assert "keys and values" in shown[1]
        assert (tmp_path / "run.svg").stat().st_size > 1000


def test_what_is_indented_is_for_make_and_pip() -> None:
    rest = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert {line.split()[0] for line in re.findall("^    .*", rest, re.MULTILINE)} == {
        "make", "python3", ".venv/bin/pip"
    }  # fmt: skip
