"""`octavo chat --url`: what is asked and shown, in a conversation with a scripted server."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.cli.scripted_server import Answer, Body, ScriptedServer, event, said
from tests.cli.test_chat import Terminal
from typer.testing import CliRunner

from octavo.cli.main import app


def answer(body: Body) -> Iterator[bytes]:
    yield said("", role="assistant")
    yield b": ping\n\n"
    yield said("", reasoning_content="hm, ", reasoning="hm, ")
    yield said("", reasoning="well")
    for word in str(body["messages"][-1]["content"]).split():
        yield said(word + ".")
    yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    yield event(b"[DONE]")


def chat(server: ScriptedServer, *lines: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
    arguments = ["chat", "--url", server.url, *flags]
    result = CliRunner().invoke(app, arguments, input="".join(f"{line}\n" for line in lines))
    return result.exit_code, result.stdout, result.stderr


def test_turns_add_up_without_the_reasoning(server: ScriptedServer) -> None:
    server.script = answer
    code, text, _ = chat(server, "one two", "three", flags=("--system", "be kind", "--top-k", "5", "--stop", "x"))
    assert code == 0
    assert text == "hm, well\n\none.two.\nhm, well\n\nthree.\n"
    asked = server.asked[1]
    assert asked["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "one.two."},
        {"role": "user", "content": "three"},
    ]
    assert (asked["model"], asked["stream"], asked["top_k"], asked["stop"]) == ("first", True, 5, ["x"])
    assert "max_tokens" not in asked


def test_a_refusal_is_told_and_forgotten(server: ScriptedServer) -> None:
    refusal = Answer(400, {"error": {"message": "too long for me", "type": "x", "param": None, "code": None}})
    server.script = lambda body: refusal if body["messages"][-1]["content"] == "long" else answer(body)
    code, text, _ = chat(server, "long", "short", flags=("--model", "mine"))
    assert code == 0
    assert "HTTP 400: too long for me" in text
    assert server.asked[1]["messages"] == [{"role": "user", "content": "short"}]
    assert server.asked[1]["model"] == "mine"


def test_an_error_in_the_middle_keeps_what_was_said(server: ScriptedServer) -> None:
    def fail(_: Body) -> Iterator[bytes]:
        yield said("so far")
        yield event({"error": {"message": "engine trouble"}})
        yield event(b"[DONE]")

    server.script = fail
    code, text, _ = chat(server, "a", "b")
    assert code == 0
    assert text.count("engine trouble") == 2
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "so far"}


def test_a_server_that_does_not_stream_is_told(server: ScriptedServer) -> None:
    server.script = lambda _: Answer(200, {"choices": []})
    assert "did not stream" in chat(server, "a")[1]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--url", "nonsense"), "url="),
        (("--url", "http://127.0.0.1:1", "--max-num-seqs", "4"), "no effect with --url"),
        (("--api-key", "k"), "without --url"),
        (("--url", "http://127.0.0.1:1", "--temperature", "-1"), "temperature"),
    ],
)
def test_a_mistake_is_the_users(flags: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(app, ["chat", *flags])
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("models", "code"), [(Answer(401, {"error": {"message": "who?"}}), 1), (Answer(200, {"data": []}), 2)]
)
def test_no_model_to_talk_with(server: ScriptedServer, models: Answer, code: int) -> None:
    server.models = models
    exit_code, _, complaint = chat(server, "a")
    assert exit_code == code
    assert ("--api-key" in complaint) == (models.status == 401)


def test_ctrl_c_stops_the_answer_and_the_servers_work(server: ScriptedServer) -> None:
    def go_on(_: Body) -> Iterator[bytes]:
        while True:
            yield said("word ")

    server.script = go_on
    with Terminal("chat", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("talk\n")
        terminal.wait_for("word word")
        terminal.interrupt(until="[stopped]")
        assert server.client_left.wait(30)
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0


def test_reasoning_is_dimmed_on_a_terminal(server: ScriptedServer) -> None:
    server.script = answer
    with Terminal("chat", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("yes\n")
        terminal.wait_for("\x1b[2mhm, \x1b[0m\x1b[2mwell\x1b[0m\r\n\r\nyes.")
        terminal.type("/exit\n")
        assert terminal.wait() == 0


def test_talking_with_a_server_needs_no_engine() -> None:
    program = (
        "import sys; from octavo.cli.main import app\n"
        "try: app(['chat', '--url', 'http://127.0.0.1:1'])\n"
        "except SystemExit as end: assert end.code == 1, end.code\n"
        "print([name for name in ('torch', 'tokenizers', 'numpy', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.splitlines()[-1] == "[]"
