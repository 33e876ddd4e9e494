"""kill -9 of the whole server during a batch: every line is once in the output, with the answer that it always had."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.server.batch_client import COMPLETION, as_lines, create, input_line, results, state_of, wait_for_end
from tests.server.http_server import HttpServer


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("num_lines", "num_kills"), [(200, 1), pytest.param(10_000, 2, marks=pytest.mark.full)])
def test_every_line_is_answered_once(num_lines: int, num_kills: int, tmp_path: Path) -> None:
    common = {"max_tokens": 12, "temperature": 0, "seed": 1}
    bodies = [{"prompt": f"{number % 50} + 1 =", **common} for number in range(num_lines)]
    bodies[7] = {"prompt": "x", "max_tokens": -5}
    flags = ("--state-dir", str(tmp_path / "state"), "--no-access-log", "--max-batch-running", "16")
    batch_id = ""
    for kill in range(num_kills):
        with HttpServer(*flags, has_model=False) as server:
            if not batch_id:
                lines = [input_line(f"{number}", COMPLETION, body) for number, body in enumerate(bodies)]
                batch_id = create(server, as_lines(lines), COMPLETION)["id"]
            enough = num_lines * (kill + 1) // (num_kills + 2)
            while (counts := state_of(server, batch_id)["request_counts"])["completed"] < enough:
                time.sleep(0.01)
            assert counts["completed"] < num_lines - 1
            os.kill(server.process.pid, signal.SIGKILL)
    with HttpServer(*flags, has_model=False) as server:
        assert state_of(server, batch_id)["request_counts"]["completed"] >= enough  # not from the beginning
        ended = wait_for_end(server, batch_id)
        assert ended["status"] == "completed"
        assert ended["request_counts"] == {"total": num_lines, "completed": num_lines - 1, "failed": 1}
        answers, errors = (results(server, ended[name]) for name in ("output_file_id", "error_file_id"))
        prompts = [body["prompt"] for body in bodies[50:100]]
        direct = server.post(COMPLETION, bodies[0] | {"prompt": prompts}).json()["choices"]
    assert [line["custom_id"] for line in answers] == [f"{number}" for number in range(num_lines) if number != 7]
    assert [line["custom_id"] for line in errors] == ["7"]
    for line in answers:
        [choice] = line["response"]["body"]["choices"]
        assert choice["text"] == direct[int(line["custom_id"]) % 50]["text"]
