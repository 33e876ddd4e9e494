"""Prompts from files: ShareGPT's conversations, JSON lines; how requests arrive, and what is reported of them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.cli.scripted_server import ScriptedServer
from tests.cli.test_bench_serve import bench, report_of

from octavo.cli.datasets import read_lines, read_sharegpt
from octavo.cli.load_report import parse_ranks
from octavo.cli.load_test import Workload
from octavo.errors import InvalidParameterError


def sharegpt(folder: Path, count: int = 20) -> Path:
    turns = [
        [
            {"from": "human", "value": f"Question {number}, long enough?"},
            {"from": "gpt", "value": "x" * 4 * (number + 4)},
        ]
        for number in range(count)
    ]
    odd: list[Any] = [
        [],
        [{"value": "alone"}],
        [{"value": "a"}, {"value": "b"}],
        [{"value": "x" * 9999}, {"value": "y" * 99}],
    ]
    path = folder / "share.json"
    path.write_text(json.dumps([{"id": "1", "conversations": each} for each in turns + odd]))
    return path


def bodies(workload: Workload) -> list[dict[str, Any]]:
    return [json.loads(record.body) for record in workload.plan()]


def test_sharegpt_has_first_questions_and_lengths_of_answers(tmp_path: Path) -> None:
    path = sharegpt(tmp_path)
    assert [sample.output_len for sample in read_sharegpt(str(path))] == list(range(4, 24))
    workload = Workload(dataset="sharegpt", dataset_path=str(path), endpoint="chat", num_prompts=5, seed=3)
    sent = bodies(workload)
    assert sent == bodies(workload) != bodies(replace(workload, seed=4))
    questions = [body["messages"][0]["content"] for body in sent]
    assert len({*questions}) == 5
    assert [body["max_tokens"] for body in sent] == [int(text.split()[1].strip(",")) + 4 for text in questions]
    assert {body["max_tokens"] for body in bodies(replace(workload, output_len="7"))} == {7}


def test_lines_are_sent_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "one", "output_len": 3}, {"prompt": [5, 6], "max_tokens": 4}, {"messages": messages}
    ]  # fmt: skip
    path.write_text("\n\n".join(map(json.dumps, lines)))
    workload = Workload(dataset="file", dataset_path=str(path), num_prompts=3, endpoint="chat")
    sent = bodies(workload)
    assert [body["max_tokens"] for body in sent] == [3, 4, 64]
    assert sent[2]["messages"] == messages
    assert [body["prompt"] for body in bodies(replace(workload, endpoint="completions", num_prompts=2))] == [
        "one",
        [5, 6],
    ]
    with pytest.raises(InvalidParameterError, match="chat: the dataset has conversations"):
        bodies(replace(workload, endpoint="completions"))
    with pytest.raises(InvalidParameterError, match="num_prompts=4: at most 3"):
        bodies(replace(workload, num_prompts=4))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": 5}', "line 1: "),
        ('{"prompt": "a"}\n{}', "line 2: must have either"),
        ('{"prompt": "a", "messages": []}', "line 1: must have either"),
        ('{"prompt": "a", "output_len": 0}', "line 1: output_len"),
        ("", "no prompt"),
        ("{", "line 1: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidParameterError, match=complaint):
        read_lines(str(path))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for read in (read_lines, read_sharegpt):
        with pytest.raises(InvalidParameterError, match="cannot be read: No such file"):
            read(str(tmp_path / "none"))
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(InvalidParameterError, match="ShareGPT"):
        read_sharegpt(str(tmp_path / "x.json"))
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(InvalidParameterError, match="no conversation"):
        read_sharegpt(str(tmp_path / "x.json"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dataset": "file"}, "a file is needed"),
        ({"dataset_path": "x"}, "none for random prompts"),
        ({"burstiness": 0.5}, "no effect without --rate"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidParameterError, match=complaint):
        Workload(**options)


def test_bursts_have_the_same_rate_and_more_spread() -> None:
    def gaps(burstiness: float) -> list[float]:
        workload = Workload(rate=50.0, burstiness=burstiness, num_prompts=4000, input_len="1", output_len="1")
        times_s = [record.send_at_s for record in workload.plan()]
        return [later - earlier for earlier, later in pairwise(times_s)]

    for burstiness in (0.25, 4.0):
        found = gaps(burstiness)
        mean_s = sum(found) / len(found)
        spread = sum((gap - mean_s) ** 2 for gap in found) / len(found) / mean_s**2
        assert mean_s == pytest.approx(1 / 50, rel=0.15)
        assert spread == pytest.approx(1 / burstiness, rel=0.3)


def test_percentiles_that_are_asked_for(server: ScriptedServer) -> None:
    report = report_of(server, "--percentiles", "25,99.9", "--request-rate", "500", "--burstiness", "0.5")
    assert {name for name in report if name.startswith("end_to_end_ms")} == {
        "end_to_end_ms_mean", "end_to_end_ms_p25", "end_to_end_ms_p99.9"
    }  # fmt: skip
    assert parse_ranks("50 90,99") == (50.0, 90.0, 99.0)
    for text in ("", "0", "101", "x"):
        with pytest.raises(InvalidParameterError, match="percentiles"):
            parse_ranks(text)


def test_a_dataset_over_http(server: ScriptedServer, tmp_path: Path) -> None:
    flags = ("--dataset-name", "sharegpt", "--dataset-path", str(sharegpt(tmp_path)), "--endpoint", "chat")
    code, _, complaint = bench(server, *flags, "--max-concurrency", "2")
    assert code == 0, complaint
    said = [body["messages"][0]["content"] for body in server.asked]
    assert sum("long enough?" in text for text in said) == 6
    assert len(said) == 8  # the warm-up is random
