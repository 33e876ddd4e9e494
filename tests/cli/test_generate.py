"""`octavo generate`: where prompts come from, what is printed, and Ctrl-C."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.fakes import OCTAVO
from typer.testing import CliRunner

from octavo.cli.generate import collect_prompts, follow_all, raise_first_error
from octavo.cli.main import app
from octavo.errors import InvalidParameterError, RequestError
from octavo.kernels.dispatch import is_built
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput


def octavo(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    """Run the program in this process, the engine core included; return exit code, output, complaints."""
    result = CliRunner().invoke(app, ["generate", "--no-engine-process", *arguments], input=stdin)
    return result.exit_code, result.stdout, result.stderr


def generate(*arguments: str, stdin: str | None = None) -> str:
    code, text, complaint = octavo(
        "--model", "demo", "--max-tokens", "6", "--temperature", "0", *arguments, stdin=stdin
    )
    assert code == 0, complaint
    assert "\x1b" not in text
    return text


def test_the_same_text_by_flag_file_pipe_and_json(tmp_path: Path) -> None:
    text = "Hello, world!"
    (tmp_path / "prompt.txt").write_text(text + "\n", encoding="utf-8")
    plain = generate("--prompt", text)
    assert plain.strip()
    assert generate("--file", str(tmp_path / "prompt.txt")) == plain
    assert generate(stdin=text + "\n") == plain
    assert generate(stdin="\ufeff" + text) == plain
    output = json.loads(generate("--prompt", text, "--json"))
    assert output["outputs"][0]["text"] + "\n" == plain
    assert output["prompt"] == text
    assert output["finished"] is True


def test_many_prompts_are_labelled_and_in_order() -> None:
    lines = [
        json.loads(line) for line in generate("--lines", "--json", stdin="Hello\n\nWhat is Octavo?\n").splitlines()
    ]
    assert [line["prompt"] for line in lines] == ["Hello", "What is Octavo?"]
    plain = generate("--prompt", "Hello", "--prompt", "What is Octavo?")
    labels = [line for line in plain.splitlines() if line.startswith("[")]
    assert labels == ["[1] Hello", "[2] What is Octavo?"]
    assert lines[1]["outputs"][0]["text"] in plain


def test_seed_and_samples() -> None:
    flags = ("--prompt", "Hello", "--temperature", "1", "--seed", "3", "--n", "2", "--json")
    first, second = (json.loads(generate(*flags))["outputs"] for _ in range(2))
    assert [sample["token_ids"] for sample in first] == [sample["token_ids"] for sample in second]
    assert len(first) == 2
    labels = [line for line in generate(*flags[:-1]).splitlines() if line.startswith("[")]
    assert labels == ["[1.1] Hello", "[1.2] Hello"]


def test_a_pipe_gets_plain_text_from_the_real_program() -> None:
    command = [*OCTAVO, "generate", "--max-tokens", "6", "--temperature", "0"]
    done = subprocess.run(command, input="Hello", capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == generate("--prompt", "Hello") if RUNS_ALL else done.stdout.count("\n") == 1
    # Where there was no compiler, one line says so; a pipe sees nothing else.
    lines = done.stderr.splitlines()
    assert len(lines) == (not is_built())
    assert all("C++ kernels were not built" in line for line in lines)


@pytest.mark.parametrize("encoding", pick(["cp1252"], ["ascii", "cp1252", "utf-8"]))
def test_pipes_in_any_locale(encoding: str) -> None:
    """Input is UTF-8, JSON stays JSON, and text has escapes for what the encoding lacks."""
    prompt = "Größe 🙂"
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        command = [*OCTAVO, "generate", "--no-engine-process", "--model", "demo", "--max-tokens", "2", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, env=environment, timeout=120)
        return done.returncode, done.stdout, done.stderr.decode()

    code, text, complaint = run("--json", "--lines", stdin=f"{prompt}\nx\n".encode())
    assert code == 0, complaint
    assert [json.loads(line)["prompt"] for line in text.decode().splitlines()] == [prompt, "x"]
    assert (prompt.encode() in text) == (encoding == "utf-8")
    code, text, complaint = run("--prompt", prompt, "--prompt", "x")
    assert code == 0, complaint
    assert text.startswith(b"[1] " + prompt.encode(encoding, "backslashreplace"))


@pytest.mark.parametrize("command", pick(["generate"], ["generate", "chat"]))
def test_input_that_is_not_utf8_is_refused_with_its_place(command: str) -> None:
    text = b"ab\\\n\xc3\xa9\xff"
    done = subprocess.run([*OCTAVO, command, "--model", "demo"], input=text, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"standard input='byte 0xff': must be UTF-8; it is not at byte 3 of line 2" in done.stderr


def test_chat_answers_through_the_template() -> None:
    output = json.loads(generate("--chat", "--json", "--prompt", "What is Octavo?"))
    assert len(output["prompt_token_ids"]) > 4
    assert output["outputs"][0]["text"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--prompt", "x", "--top-p", "3"), "octavo: top_p=3.0: between 0 and 1\n"),
        (("--prompt", "x", "--model", "/no/such/folder"), "/no/such/folder"),
        (("--prompt", "x", "--max-model-len", "0"), "octavo: max_model_len=0: an integer of at least 1\n"),
        (("--file", "/no/such/file"), "octavo: file='/no/such/file': cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], complaint: str) -> None:
    code, text, line = octavo(*arguments)
    assert (code, text) == (2, "")
    assert complaint in line
    assert "Traceback" not in line


def test_ctrl_c_prints_what_there_is() -> None:
    command = [*OCTAVO, "generate", "--prompt", "Hello", "--max-tokens", "2000"]
    command += ["--ignore-eos", "--temperature", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    rest, complaint = child.communicate(timeout=60)
    assert child.returncode == 130, complaint
    assert first
    assert rest.endswith("\n")
    assert "Traceback" not in complaint


def test_prompts_come_in_the_order_flags_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "two.txt"
    file.write_text("one\ntwo\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    assert collect_prompts(["flag"], [file], by_line=False) == ["flag", "one\ntwo"]
    assert collect_prompts(["flag"], [file, Path("-")], by_line=True) == ["flag", "one", "two", "piped"]


def test_no_prompt_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(InvalidParameterError, match="prompt"):
        collect_prompts([], [], by_line=False)


def output(request_id: str, text: str) -> RequestOutput:
    sample = CompletionOutput(index=0, text=text, token_ids=[0] * len(text), seed=0)
    metrics = RequestMetrics(arrival_time_s=0.0)
    return RequestOutput(
        request_id=request_id, prompt=None, prompt_token_ids=[1], outputs=[sample], finished=False, metrics=metrics
    )


async def endless(request_id: str, started: asyncio.Event) -> AsyncIterator[RequestOutput]:
    yield output(request_id, "so far")
    started.set()
    await asyncio.Event().wait()


async def short(request_id: str) -> AsyncIterator[RequestOutput]:
    for text in ("o", "on", "one"):
        yield output(request_id, text)


async def test_interrupting_returns_what_each_prompt_has() -> None:
    started = asyncio.Event()
    task = asyncio.create_task(follow_all([short("a"), endless("b", started)]))
    await started.wait()
    task.cancel()
    outputs, was_interrupted = await task
    assert was_interrupted
    assert {index: each.text for index, each in outputs.items()} == {0: "one", 1: "so far"}


async def test_following_to_the_end_shows_every_step() -> None:
    seen: list[str] = []
    _, was_interrupted = await follow_all([short("a")], lambda each: seen.append(each.text))
    assert not was_interrupted
    assert seen == ["o", "on", "one"]


def test_a_failed_request_is_an_error_though_the_others_went_well() -> None:
    fine = output("a", "text")
    failed = replace(fine.outputs[0], finish_reason="error", error="out of luck")
    raise_first_error([fine])
    with pytest.raises(RequestError, match="out of luck"):
        raise_first_error([fine, replace(fine, outputs=[failed])])


def test_an_answer_by_a_schema(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}', encoding="utf-8")
    assert generate("--prompt", "Hello", "--json-schema", str(schema)).strip() in ('"yes"', '"no"')
    schema.write_text('{"enum": ', encoding="utf-8")
    code, _, complaint = octavo("--model", "demo", "--prompt", "Hello", "--json-schema", str(schema))
    assert code == 2
    assert "json_schema" in complaint
    assert "line 1" in complaint
