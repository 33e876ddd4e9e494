"""`octavo bench`: figures that add up, from runs of the bundled model."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli.bench import request_times
from octavo.cli.main import app
from octavo.kernels.dispatch import native_kernels
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput


def bench(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.stdout, result.stderr


def reports(*arguments: str) -> list[dict[str, Any]]:
    code, text, complaint = bench(*arguments, "--model", "demo", "--input-len", "5", "--output-len", "4", "--json")
    assert code == 0, complaint
    return [json.loads(line) for line in text.splitlines()]


def test_throughput_adds_up() -> None:
    drafting = '{"model": "demo", "num_speculative_tokens": 2, "adaptive": false}'  # for itself: it is always right
    [report] = reports("throughput", "--num-prompts", "3", "--speculative-config", drafting)
    assert report["num_drafts"] == 3 * 2
    assert report["tokens_per_step"] == 2.0  # one by the prompt's step, and three by another
    assert [report[f"draft_acceptance{at}"] for at in ("", "_at_0", "_at_1")] == [1.0] * 3
    assert report["requests_per_s"] == pytest.approx(3 / report["elapsed_s"])
    assert report["output_tokens_per_s"] == pytest.approx(12 / report["elapsed_s"])
    assert report["total_tokens_per_s"] == pytest.approx(27 / report["elapsed_s"])
    assert 0 < report["time_to_first_token_ms_p50"] <= report["time_to_first_token_ms_p99"] <= report["elapsed_s"] * 1e3
    assert report["time_per_output_token_ms_mean"] > 0
    if native_kernels() is not None:
        assert 0 < report["compute_share"] < 1


def test_pictures_count_beside_tokens() -> None:
    options = [
        "--model",
        "demo-vl",
        "--input-len",
        "5",
        "--output-len",
        "4",
        "--num-images",
        "2",
        "--image-size",
        "90x84",
        "--json",
    ]
    code, text, complaint = bench("throughput", "--num-prompts", "3", *options)
    assert code == 0, complaint
    report = json.loads(text)
    assert report["images_per_s"] == pytest.approx(6 / report["elapsed_s"])
    assert report["total_tokens_per_s"] * report["elapsed_s"] > 3 * (2 * 9 + 5 + 4)
    code, text, _ = bench("latency", "--num-iters", "1", *options)
    assert code == 0
    assert json.loads(text)["images_per_s"] == pytest.approx(2e3 / json.loads(text)["latency_ms_mean"])


def test_latency_has_a_report_for_each_batch_size() -> None:
    small, large = reports("latency", "--batch-size", "1", "--batch-size", "3", "--num-iters", "2", "--num-warmup", "0")
    assert (small["batch_size"], large["batch_size"]) == (1, 3)
    for report in (small, large):
        assert report["time_to_first_token_ms_mean"] < report["latency_ms_mean"]
        seconds = report["latency_ms_mean"] / 1e3
        assert report["output_tokens_per_s"] == pytest.approx(report["batch_size"] * 4 / seconds)


def test_a_table_for_people() -> None:
    code, text, _ = bench("latency", "--input-len", "3", "--output-len", "2", "--num-iters", "1", "--num-warmup", "0")
    assert code == 0
    assert dict(line.split() for line in text.splitlines())["batch_size"] == "1"
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["throughput", "--num-prompts", "0"], "num-prompts"),
        (["latency", "--input-len", "999999"], "context length"),
        (["latency", "--num-images", "1"], "takes text only"),
        (["latency", "--model", "demo-vl", "--num-images", "1", "--image-size", "big"], "448x448"),
    ],
)
def test_a_mistake_is_the_users(arguments: list[str], complaint: str) -> None:
    code, _, line = bench(*arguments)
    assert code == 2
    assert complaint in line


def test_times_of_one_token_outputs_have_no_time_per_token() -> None:
    metrics = RequestMetrics(arrival_time_s=1.0, first_token_time_s=1.5, finished_time_s=3.5)

    def output(num_tokens: int) -> RequestOutput:
        sample = CompletionOutput(index=0, text="", token_ids=[0] * num_tokens, seed=0)
        return RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=[1], outputs=[sample], finished=True, metrics=metrics
        )

    assert set(request_times([output(1)])) == {f"time_to_first_token_ms_{end}" for end in ("mean", "p50", "p90", "p99")}
    assert request_times([output(5)])["time_per_output_token_ms_mean"] == pytest.approx(500.0)
    assert request_times([output(5)])["time_to_first_token_ms_p90"] == pytest.approx(500.0)
