"""`octavo chat --url` and `octavo bench serve` against the real server."""

import json
from pathlib import Path

import pytest
from tests.server.http_server import HttpServer
from typer.testing import CliRunner

from octavo.cli.main import app


def octavo(*arguments: str, typed: str = "") -> str:
    result = CliRunner().invoke(app, arguments, input=typed)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_conversation(server: HttpServer) -> None:
    typed = "My name is Ada.\nWhat is my name?\n/reset\nWhat is 2 + 3?\n"
    lines = octavo("chat", "--url", server.url, "--temperature", "0", typed=typed).splitlines()
    assert "Ada" in lines[1]
    assert "5" in lines[-1]


def test_the_same_answer_as_without_a_server(server: HttpServer) -> None:
    flags = ("--temperature", "0", "--max-tokens", "40")
    typed = "What is a block?\n"
    assert octavo("chat", "--url", server.url, *flags, typed=typed) == octavo(
        "chat", "--no-engine-process", *flags, typed=typed
    )


@pytest.mark.parametrize("load", [("--concurrency", "4"), ("--rate", "200"), ()])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_measurement(server: HttpServer, tmp_path: Path, endpoint: str, load: tuple[str, ...]) -> None:
    lengths = ("--num-prompts", "12", "--input-len", "5:20", "--output-len", "3:9", "--prefix-len", "16")
    files = ("--output", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg"))
    shown = octavo("bench", "serve", "--url", server.url, "--endpoint", endpoint, *lengths, *load, *files, "--json")
    report = json.loads(shown)
    assert (report["num_requests"], report["num_failed"], report["num_short"]) == (12, 0, 0)
    if endpoint == "completions":
        assert 12 * 21 <= report["num_prompt_tokens"] <= 12 * 36
    assert 12 * 3 <= report["num_output_tokens"] <= 12 * 9
    assert (tmp_path / "run.svg").read_text().startswith("<svg")
