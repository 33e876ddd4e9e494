"""`octavo replay`: the requests of a real server, computed again after its end; what differs is shown where it does."""

import runpy
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.breadth import RUNS_ALL, pick
from tests.fakes import CORE
from tests.server.http_server import HttpServer
from tests.server.returning_client import RawStream
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.engine import inproc_client
from octavo.server.logged.requests import FILE_NAME

KEY = "the-key-of-ann"
OWN = {"Authorization": f"Bearer {KEY}"}
CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 12}
SAMPLED: dict[str, Any] = {"prompt": "Octavo is", "max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL: dict[str, Any] = {**QUESTION, "max_tokens": 40, "tools": [WEATHER], "tool_choice": "required"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**QUESTION, "n": 2, "temperature": 1.0}),
    (CHAT, {**QUESTION, "n": 3, "temperature": 1.0, "stream": True, "stream_options": USAGE}),
    (COMPLETION, {**SAMPLED, "prompt": ["Octavo is", "A block is"], "echo": True}),
    (COMPLETION, {**SAMPLED, "stream": True, "return_token_ids": True}),
    (COMPLETION, {**SAMPLED, "stream": True, "seed": 7}),
    (COMPLETION, {**SAMPLED, "stream": True, "prompt": ["Octavo is", "A block is"]}),
    (COMPLETION, {**SAMPLED, "max_tokens": -5}),
    (COMPLETION, {**SAMPLED, "timeout": 0.03, "max_tokens": 400}),
    ("/v1/embeddings", {"input": ["Octavo is", "A block is"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": "x", "dimensions": 3}),
    (MESSAGES, {**QUESTION, "system": "Be kind.", "temperature": 1}),
    (MESSAGES, {**QUESTION, "temperature": 1, "stream": True}),
    (MESSAGES, {**QUESTION, "stop_sequences": ["x"] * 99}),
]
RICH: list[tuple[str, dict[str, Any]]] = [  # what fake models do not have
    (CHAT, {**QUESTION, "n": 3, "stream": True, "logprobs": True, "top_logprobs": 2, "temperature": 1.0}),
    (CHAT, CALL | {"stream": True}),
    (CHAT, CALL | {"temperature": 1.0, "parallel_tool_calls": False}),
    (CHAT, {**QUESTION, "max_tokens": 40, "response_format": FORMAT}),
    (COMPLETION, {**SAMPLED, "logprobs": 2, "prompt_logprobs": 1, "stream": True}),
]


@pytest.fixture
def with_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines in this process compute what fake servers do."""
    if not RUNS_ALL:
        make_executor = runpy.run_path(CORE[-1])["make_executor"]
        monkeypatch.setattr(inproc_client, "make_executor", make_executor)


@pytest.fixture
def replay() -> Callable[..., tuple[int, str]]:
    """Return what runs the program in this process, and returns its exit code and what it says."""

    def run(folder: Path, *arguments: str) -> tuple[int, str]:
        command = ["replay", "--request-log", str(folder), "--no-engine-process", *arguments]
        result = CliRunner().invoke(app, command)
        return result.exit_code, result.output

    return run


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a server that has ended."""
    folder = tmp_path_factory.mktemp("logs") / "log"
    flags = ("--request-log", str(folder), "--api-key", KEY, "--resume-s", "60", "--served-model-name", "octavo")
    with HttpServer(*flags, has_model=False, headers=OWN) as server:
        for number, (path, body) in enumerate(REQUESTS + pick([], RICH)):
            if body.get("stream") and path != MESSAGES:
                RawStream(server, body, path=path, headers={**OWN, "X-Request-Id": f"mine-{number}"}).events()
            else:
                server.client.post(path, json=body, headers={"X-Request-Id": f"mine-{number}"})
        keyed = {"Idempotency-Key": "k"}
        assert len({server.client.post(COMPLETION, json=SAMPLED, headers=keyed).text for _ in range(2)}) == 1
        check_that_a_failure_costs_no_request(server, folder / FILE_NAME)
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        assert folder.stat().st_mode & 0o777 == 0o700
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0, server.log
    assert KEY.encode() not in b"".join(path.read_bytes() for path in folder.iterdir())
    return folder


def check_that_a_failure_costs_no_request(server: HttpServer, path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE totals RENAME TO gone")
        health = {"status": "ok", "request_log": f"{path.name} cannot be used: no such table: totals"}
        assert server.post(COMPLETION, {**SAMPLED, "max_tokens": 1}).status_code == 200
        wait_for_health(server, health)
        assert server.log.count("not logged") == 1
        db.execute("ALTER TABLE gone RENAME TO totals")
    server.post(COMPLETION, {**SAMPLED, "max_tokens": 1})
    wait_for_health(server, {"status": "ok"})


def wait_for_health(server: HttpServer, expected: dict[str, str]) -> None:
    while (health := server.client.get("/health").json()) != expected:
        assert health["status"] == "ok"
        time.sleep(0.01)


@pytest.mark.usefixtures("with_fake")
def test_every_answer_has_the_same_bytes(log: Path, replay: Callable[..., tuple[int, str]]) -> None:
    code, listed = replay(log, "--list")
    assert code == 0
    assert len(listed.splitlines()) == len(REQUESTS + pick([], RICH)) + 2  # one of the two with a key, and the last
    assert " (mine-1) /v1/chat/completions stream 200 " in listed
    assert " mine-6 /v1/completions whole 400 0+0 tokens " in listed  # there was no answer that could have an id
    code, said = replay(log, "--all")
    verdicts = {line.partition(" s: ")[0]: line.partition(" s: ")[2] for line in said.splitlines()}
    assert verdicts.keys() == {line.removesuffix(" s") for line in listed.splitlines()}, said
    assert all(verdict.startswith("equal") for verdict in verdicts.values()), said
    [cut] = [verdict for name, verdict in verdicts.items() if "(mine-7)" in name]
    assert cut.startswith("equal as far as it went, ")
    assert "(408 The request reached its time limit" in cut
    assert cut.endswith("this time it ends well")
    assert code == 0
    [name] = [line.split()[3] for line in listed.splitlines() if "(mine-0)" in line]
    code, said = replay(log, name, "mine-5", "mine-0")
    assert (code, said.count(": equal")) == (0, 2)  # each once


@pytest.mark.usefixtures("with_fake")
def test_a_difference_is_shown_where_it_is(log: Path, replay: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    with closing(sqlite3.connect(log / FILE_NAME)) as source, closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        source.backup(db)
        contents = "SELECT seq, answer, token_ids FROM contents JOIN requests USING (seq) WHERE request_id = ?"
        [number, answer, tokens] = db.execute(contents, ("mine-4",)).fetchone()
        frames = answer.split(b"\n\n")
        at = next(at for at, frame in enumerate(frames) if at > 3 and b'"text":""' not in frame)
        before = "".join(_text(frame) for frame in frames[:at])
        frames[at] = frames[at].replace(b'"text":"', b'"text":"\xc3\xa9')
        tokens = msgspec.msgpack.decode(tokens)
        tokens[0][6] += 1
        values = (b"\n\n".join(frames), msgspec.msgpack.encode(tokens), number)
        db.execute("UPDATE contents SET answer = ?, token_ids = ? WHERE seq = ?", values)
        [number, answer, _] = db.execute(contents, ("mine-6",)).fetchone()
        db.execute("UPDATE contents SET answer = ? WHERE seq = ?", (answer.replace(b"at least", b"at most"), number))
        [identity] = db.execute("SELECT body FROM identities").fetchone()
        changed = msgspec.json.decode(identity) | {"weights": "other", "version": "0.0.1"}
        db.execute("UPDATE identities SET body = ?", (msgspec.json.encode(changed),))
        db.commit()
    code, said = replay(tmp_path, "mine-4", "mine-6", "mine-0")
    assert code == 1
    lines = said.splitlines()
    assert "mine-4" in lines[0]
    assert lines[0].endswith(": differs")
    assert lines[1].startswith(f"  choice 0, token 6: logged {tokens[0][6]} ")
    assert f"replayed {tokens[0][6] - 1} " in lines[1]
    assert lines[2] == f"  choices[0].text, character {len(before)}:"
    assert "é" in lines[3]
    assert "é" not in lines[4]
    assert lines[5] == "  version was '0.0.1', is '0.1.0'"
    assert lines[6].startswith("  weights was 'other', is ")
    assert "  error.message, character 18:" in lines, said
    assert lines[-1] == "octavo: 2 of 3 answers differ"


@pytest.mark.usefixtures("with_fake")
def test_what_cannot_be_computed(log: Path, replay: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = replay(log, "cmpl-none")
    assert code == 2
    assert "not in the log" in said
    assert replay(log)[0] == replay(log, "mine-0", "--all")[0] == replay(tmp_path, "--list")[0] == 2
    body: dict[str, Any] = {**SAMPLED, "model": "adapter"}
    with closing(sqlite3.connect(log / FILE_NAME)) as source, closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        source.backup(db)
        seq = "(SELECT seq FROM requests WHERE request_id = 'mine-4')"
        db.execute(f"UPDATE contents SET body = ? WHERE seq = {seq}", (msgspec.json.encode(body),))
        db.commit()
    code, said = replay(tmp_path, "mine-4")
    assert code == 2
    assert "cannot be computed here: The model 'adapter' does not exist. Available: octavo." in said


@pytest.mark.full
def test_adapters_and_drafts_and_a_change_of_weights(replay: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    flags = ("--request-log", str(tmp_path), "--enable-lora", "--lora-modules", "a=demo-json", "--speculative-config")
    body: dict[str, Any] = {**SAMPLED, "prompt": "Octavo is a book. " * 8, "max_tokens": 30, "temperature": 0.7}
    with HttpServer(*flags, '{"method": "ngram", "num_speculative_tokens": 4}') as server:
        for model in ("a", "demo"):
            assert server.post(COMPLETION, {**body, "model": model}).status_code == 200
            server.stream(COMPLETION, {**body, "model": model})
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0, server.log
    code, said = replay(tmp_path, "--all")
    assert (code, said.count(": equal")) == (0, 4), said
    code, said = replay(tmp_path, "--all", "--quantization", "int4")
    assert code == 1
    assert "  quantization was the default, is 'int4'\n" in said
    assert "  profile was '" in said


def _text(frame: bytes) -> str:
    return str(msgspec.json.decode(frame.removeprefix(b"data: "))["choices"][0]["text"])
