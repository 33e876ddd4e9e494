"""`octavo chat`: the conversation it keeps, its commands, and the real thing in a terminal."""

import asyncio
import base64
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from tests.fakes import OCTAVO

from octavo.cli.chat import ChatSession, chat_params, stream_local
from octavo.cli.options import AnswerOptions
from octavo.config.args import EngineArgs
from octavo.config.model import GenerationDefaults
from octavo.errors import EngineDeadError, InvalidParameterError
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.sampling_params import SamplingParams


class EchoLLM:
    """Answers with the last message, word by word; some messages are special."""

    def __init__(self) -> None:
        self.asked: list[list[Mapping[str, object]]] = []

    async def chat_stream(
        self, messages: Sequence[Mapping[str, object]], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append(list(messages))
        text = str(messages[-1]["content"])
        if text == "be silent":
            text = ""
        if text == "too long":
            raise InvalidParameterError("prompt", "9 tokens", "at most 8")
        if text == "die":
            raise EngineDeadError("gone")
        for end in [*(position for position, character in enumerate(text) if character == " "), len(text)]:
            yield _output(text[:end])
            if text.startswith("interrupt"):
                raise KeyboardInterrupt


def _output(text: str) -> RequestOutput:
    sample = CompletionOutput(index=0, text=text, token_ids=[], seed=0)
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1], outputs=[sample], finished=False,
        metrics=RequestMetrics(arrival_time_s=0.0),
    )  # fmt: skip


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def talk(monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, *lines: str, system: str | None = None) -> EchoLLM:
    """Run a session on these lines; return the model, which knows what it was asked."""
    script = iter(lines)

    def next_line(_prompt: str = "") -> str:
        line = next(script, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", next_line)
    llm = EchoLLM()
    model: Any = llm
    ChatSession(lambda messages: stream_local(model, SamplingParams(), messages), runner, system).run()
    return llm


def test_turns_add_up(
    monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = talk(monkeypatch, runner, "one two", "", "three", system="be kind")
    assert llm.asked[-1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "three"},
    ]
    assert capsys.readouterr().out == "one two\nthree\n"


def test_commands(monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]) -> None:
    llm = talk(monkeypatch, runner, "a", "/reset", "b", "/system new rules", "c", "/system", "d", "/exit", "never")
    user = [{"role": "user", "content": text} for text in "bcd"]
    assert llm.asked[1:] == [[user[0]], [{"role": "system", "content": "new rules"}, user[1]], [user[2]]]
    assert "never" not in capsys.readouterr().out


def test_help_lists_every_command_and_a_wrong_one_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = talk(monkeypatch, runner, "/help", "/rest")
    text = capsys.readouterr().out
    assert all(f"/{name}" in text for name in ("help", "reset", "system", "exit"))
    assert "did you mean 'reset'?" in text
    assert llm.asked == []


def test_a_backslash_goes_on_with_the_next_line(monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner) -> None:
    llm = talk(monkeypatch, runner, "one\\", "two")
    assert llm.asked[0][-1]["content"] == "one\ntwo"


def test_an_interrupted_answer_is_kept_as_far_as_it_was_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with asyncio.Runner() as runner:
        llm = talk(monkeypatch, runner, "interrupt me", "go on")
    assert llm.asked[1][1] == {"role": "assistant", "content": "interrupt"}
    assert "[stopped]" in capsys.readouterr().out


def test_a_refused_message_is_told_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = talk(monkeypatch, runner, "too long", "short")
    assert llm.asked[1] == [{"role": "user", "content": "short"}]
    assert "at most 8" in capsys.readouterr().out


def test_a_dead_engine_ends_the_program(monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner) -> None:
    with pytest.raises(EngineDeadError):
        talk(monkeypatch, runner, "die", "never")


def test_a_question_without_an_answer_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = talk(monkeypatch, runner, "be silent", "go on")
    assert llm.asked[1] == [{"role": "user", "content": "go on"}]


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [*OCTAVO, *arguments]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.text = ""
        self._seen = 0  # up to where `wait_for` has read

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, wanted: str, *, more: int = 0) -> None:
        """Read on until `wanted` has come, and `more` characters after it."""
        assert self._comes(wanted, more, timeout_s=100.0), self.text

    def interrupt(self, until: str) -> None:
        """Do what a terminal does on Ctrl-C, a signal to the whole group; the program must say something then.

        Once is not always enough: a signal between readline's prompt and its wait for a key is seen with the next key.
        """
        for _ in range(5):
            os.killpg(self.process.pid, signal.SIGINT)
            if self._comes(until, 0, timeout_s=3.0):
                return
        raise AssertionError(self.text)

    def _comes(self, wanted: str, more: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (at := self.text.find(wanted, self._seen)) < 0 or len(self.text) < at + len(wanted) + more:
            if time.monotonic() > deadline:
                return False
            self._read(timeout_s=0.5)
        self._seen = at + len(wanted)
        return True

    def _read(self, timeout_s: float) -> None:
        if select.select([self._master], [], [], timeout_s)[0]:
            self.text += os.read(self._master, 4096).decode(errors="replace")

    def wait(self) -> int:
        return self.process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)


def test_where_a_checkpoint_names_no_sampling_the_terminal_does(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineArgs(model_name="demo").resolve()
    own, sampling = SamplingParams(temperature=0.3, top_k=20), AnswerOptions({"top_p": 0.5})
    assert chat_params(own, config, sampling) == own.replace(top_p=0.5, max_tokens=None)
    neutral = replace(config, model=replace(config.model, generation=GenerationDefaults()))
    params = chat_params(SamplingParams(), replace(neutral, use_generation_config=False), AnswerOptions({}))
    assert params == SamplingParams(max_tokens=None)
    assert capsys.readouterr().err == ""
    params = chat_params(SamplingParams(), neutral, sampling)
    assert params == SamplingParams(temperature=0.8, top_k=40, top_p=0.5, min_p=0.05, max_tokens=None)
    assert "starts from temperature 0.8, top_k 40, min_p 0.05." in capsys.readouterr().err


def test_a_conversation_in_a_terminal_with_ctrl_c() -> None:
    flags = ("--model", "demo", "--ignore-eos", "--temperature", "0", "--max-tokens", "1500")
    with Terminal("chat", *flags) as terminal:
        terminal.wait_for("> ")
        terminal.type("/help\n")
        terminal.wait_for("/exit")
        terminal.wait_for("> ")
        terminal.type("What is Octavo?\n")
        terminal.wait_for("What is Octavo?\r\n", more=1)
        terminal.interrupt(until="[stopped]")
        terminal.wait_for("> ")
        terminal.interrupt(until="to quit")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text


def test_pictures_go_with_the_next_message_only(
    monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    llm = talk(monkeypatch, runner, f"/image {tmp_path}/none.png", f"/image {tmp_path}/a.png", "What?", "And now?")
    url = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    asked = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    assert [message["content"] for message in llm.asked[-1] if message["role"] == "user"] == [asked, "And now?"]
    assert "cannot be read: No such file" in capsys.readouterr().out
