"""The README's client code, as it is printed."""

import re
from pathlib import Path

import pytest
from tests.server.http_server import HttpServer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_openai_client(server: HttpServer, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:8000" in program
    exec(program.replace("http://127.0.0.1:8000", server.url), {"__name__": "__main__"})
    assert "I am Octavo's demo model" in capsys.readouterr().out
