"""`octavo bench serve` as a program, against a scripted server."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.cli.scripted_server import Answer, Body, ScriptedServer, event, tokens
from typer.testing import CliRunner

from octavo.cli.load_report import draw_run
from octavo.cli.main import app


def bench(server: ScriptedServer, *flags: str) -> tuple[int, str, str]:
    lengths = ["--input-len", "5", "--output-len", "4", "--num-prompts", "6"]
    result = CliRunner().invoke(app, ["bench", "serve", "--url", server.url, *lengths, *flags])
    return result.exit_code, result.stdout, result.stderr


def report_of(server: ScriptedServer, *flags: str) -> dict[str, Any]:
    code, text, complaint = bench(server, "--json", *flags)
    assert code == 0, complaint
    [line] = text.splitlines()
    report: dict[str, Any] = json.loads(line)
    return report


@pytest.mark.parametrize("loop", [(), ("--rate", "500"), ("--concurrency", "2")])
def test_every_loop_sends_everything(server: ScriptedServer, loop: tuple[str, ...]) -> None:
    report = report_of(server, *loop, "--warmup", "1", "--goodput", "e2e:1e6")
    assert (report["num_requests"], report["num_failed"], report["num_short"]) == (6, 0, 0)
    assert (report["num_output_tokens"], report["num_prompt_tokens"]) == (24, 42)
    assert report["goodput_share"] == 1.0
    assert len(server.asked) == 7
    assert {body["path"] for body in server.asked} == {"/v1/completions"}
    assert {body["model"] for body in server.asked} == {"first"}
    assert len({tuple(body["prompt"]) for body in server.asked}) == 7


def test_a_closed_loop_keeps_so_many_in_flight(server: ScriptedServer) -> None:
    lock = threading.Lock()
    running = most = 0

    def counting(body: Body) -> Iterator[bytes]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        yield from tokens(body["max_tokens"])
        with lock:
            running -= 1

    server.script = counting
    report_of(server, "--concurrency", "3", "--num-prompts", "30")
    assert 1 <= most <= 3


def test_the_same_seed_asks_the_same(server: ScriptedServer) -> None:
    for _ in range(2):
        report_of(server, "--concurrency", "1", "--seed", "5", "--warmup", "0")
    prompts = [body["prompt"] for body in server.asked]
    assert prompts[:6] == prompts[6:]


def test_chat(server: ScriptedServer) -> None:
    report_of(server, "--endpoint", "chat", "--model", "mine", "--api-key", "k", "--warmup", "0")
    assert {body["path"] for body in server.asked} == {"/v1/chat/completions"}
    assert {body["model"] for body in server.asked} == {"mine"}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k"}


def test_files(server: ScriptedServer, tmp_path: Path) -> None:
    figures, picture = tmp_path / "run.json", tmp_path / "run.svg"
    _, text, said = bench(server, "--json", "--output", str(figures), "--plot", str(picture))
    report = json.loads(text)
    assert str(figures) in said
    assert str(picture) in said
    saved = json.loads(figures.read_text())
    assert saved["report"] == pytest.approx(report)
    assert len(saved["requests"]) == 6
    assert saved["requests"][0]["sent_s"] == 0.0
    svg = ElementTree.fromstring(picture.read_text())
    assert len(svg.findall(".//{*}polyline")) == 3


def test_failures_are_counted_told_and_end_with_1(server: ScriptedServer) -> None:
    def sometimes(body: Body) -> Iterator[bytes] | Answer:
        number = len(server.asked)
        if number % 3 == 1:
            return Answer(429, {"error": {"message": "queue full"}})
        if number % 3 == 2:
            return iter([event({"error": {"message": "engine trouble"}})])
        return tokens(body["max_tokens"])

    server.script = sometimes
    code, text, complaint = bench(server, "--json", "--warmup", "0", "--concurrency", "1")
    assert code == 1
    assert json.loads(text)["num_failed"] == 4
    assert "4 of 6 requests failed" in complaint
    assert "HTTP 429: queue full" in complaint
    assert "engine trouble" in complaint


def test_a_server_that_hangs_is_a_failure(server: ScriptedServer) -> None:
    freed = threading.Event()

    def hang(body: Body) -> Iterator[bytes]:
        yield from tokens(1)
        freed.wait(30)

    server.script = hang
    code, _, complaint = bench(server, "--timeout", "0.2", "--num-prompts", "1", "--warmup", "0")
    freed.set()
    assert code == 1
    assert "no complete response within 0.2 s" in complaint


def test_short_answers_are_counted(server: ScriptedServer) -> None:
    server.script = lambda body: tokens(2)
    assert report_of(server)["num_short"] == 6


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--rate", "1", "--concurrency", "1"), "concurrency"),
        (("--rate", "0"), "rate"),
        (("--goodput", "speed:1"), "goodput"),
        (("--input-len", "0"), "input_len"),
        (("--timeout", "0"), "timeout"),
        (("--endpoint", "embeddings"), "endpoint"),
        (("--plot", "/no/such/folder/x.svg"), "folder"),
    ],
)
def test_a_mistake_is_the_users(server: ScriptedServer, flags: tuple[str, ...], complaint: str) -> None:
    code, _, line = bench(server, *flags)
    assert code == 2
    assert complaint in line
    assert server.asked == []


def test_a_picture_without_values_is_a_picture() -> None:
    assert ElementTree.fromstring(draw_run("a < b", [])).findall(".//{*}polyline") == []
