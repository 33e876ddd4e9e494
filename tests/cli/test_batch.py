"""`octavo batch run`: one result per line, whatever interrupts it, and an output that is never somebody else's file."""

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import OCTAVO
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.cli.result_file import ResultFile
from octavo.errors import InvalidParameterError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def batch(folder: Path, *flags: str) -> tuple[int, str]:
    """Run the program in this process; return its exit code and what it says."""
    command = ["batch", "run", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), *flags]
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.stderr


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return results by custom_id, each of which is there once."""
    lines = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def test_answers_errors_and_what_is_there_already(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is a block?"}]
    lines = [
        line("chat", CHAT, messages=question, max_tokens=4, temperature=0, model="blocks"),
        line("text", COMPLETION, prompt="1 + 1 =", max_tokens=4, temperature=0),
        "\n",
        line("wrong", COMPLETION, prompt="x", top_p=7),
        line("none", COMPLETION, prompt="x", model="other"),
        line("vector", "/v1/embeddings", input="x"),
    ]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    code, said = batch(tmp_path, "--no-engine-process", "--served-model-name", "blocks")
    assert (code, said.splitlines()[-1]) == (1, "octavo: 2 of 5 lines have errors")
    found = results(tmp_path)
    assert {name: each["response"]["status_code"] for name, each in found.items()} == {
        "chat": 200, "text": 200, "wrong": 400, "none": 404, "vector": 200
    }  # fmt: skip
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"].startswith("A block")
    assert found["wrong"]["response"]["body"]["error"]["param"] == "top_p"
    whole = (tmp_path / "out.jsonl").read_bytes()
    assert batch(tmp_path, "--model", "none")[0] == 1  # needs no model
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    kept, torn = whole.splitlines(keepends=True)[:2]
    (tmp_path / "out.jsonl").write_bytes(kept + torn[:-1])
    batch(tmp_path, "--no-engine-process", "--served-model-name", "blocks")
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept)
    again = results(tmp_path)
    assert again.keys() == found.keys()
    for name in ("chat", "text"):
        assert again[name]["response"]["body"]["choices"] == found[name]["response"]["body"]["choices"]


def test_it_goes_on_after_ctrl_c_and_kill(tmp_path: Path) -> None:
    ids = [str(number) for number in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(line(name, COMPLETION, prompt=name, max_tokens=12) for name in ids))
    out, errors = tmp_path / "out.jsonl", tmp_path / "errors"
    command = [*OCTAVO, "batch", "run", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", "demo"]
    for number, num_lines in ((signal.SIGINT, 8), (signal.SIGKILL, 20)):
        with errors.open("wb") as stderr, subprocess.Popen([*command, "--max-running", "2"], stderr=stderr) as process:
            while not out.exists() or out.read_bytes().count(b"\n") < num_lines:
                assert process.poll() is None, errors.read_text()
                time.sleep(0.01)
            os.kill(process.pid, number)
            assert process.wait() == {signal.SIGINT: 130, signal.SIGKILL: -9}[number], errors.read_text()
        assert "Traceback" not in errors.read_text()
        if number == signal.SIGINT:
            assert " left; " in errors.read_text()
    before = out.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert 20 <= before.count(b"\n") < 60
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"60 lines: 60 answered, 0 with errors; {out}\n"  # and no bar, without a terminal
    assert out.read_bytes().startswith(before)
    assert results(tmp_path).keys() == {*ids}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("my notes", "line 1 is not a result of a batch: choose another file"),
        ('{"id":"batch_req_1","custom_id":"a"}\n{"id":"ba', "has a result of another input, 'a'"),
        ('{"id":"batch_req_1"}\n', "missing required field"),
        ('{"id":"batch_req_1","custom_id":"other"}\n', "has a result of another input, 'other'"),
    ],
)
def test_a_file_with_something_else_in_it_is_left_alone(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("b", COMPLETION, prompt="x"))
    (tmp_path / "out.jsonl").write_text(content)
    result = CliRunner().invoke(app, ["batch", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert (tmp_path / "out.jsonl").read_text() == content


def test_mistakes_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{\n" + line("a", "/v1/models") + line("a", CHAT))
    code, said = batch(tmp_path, "--model", "none")
    assert code == 2
    assert "line 1: The line is not valid JSON" in said
    assert "line 2: url='/v1/models': must be '/v1/chat/completions' or '/v1/completions' or" in said
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "in.jsonl").write_text("")
    assert "The file has no lines" in batch(tmp_path)[1]
    (tmp_path / "in.jsonl").write_text(line("a", CHAT))
    assert "requires --enable-lora" in batch(tmp_path, "--lora-modules", "a=b")[1]
    same = ["batch", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "in.jsonl")]
    assert "must not be the input" in CliRunner().invoke(app, same).stderr


def test_one_program_at_a_time_writes(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InvalidParameterError, match="another program is writing it"):
            ResultFile(tmp_path / "out", ())
    ResultFile(tmp_path / "out", ()).close()
