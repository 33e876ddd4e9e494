"""Steps and requests become numbers: each once, and none per token."""

import logging

import pytest

from octavo import LLM, SamplingParams
from octavo.contracts.engine import EngineCoreOutputs, SchedulerStats
from octavo.metrics.collect import EngineMetrics
from octavo.outputs import RequestMetrics


def step(num_tokens: int = 1, num_running: int = 1) -> EngineCoreOutputs:
    stats = SchedulerStats(
        num_running=num_running, num_waiting=2, num_free_blocks=3, num_blocks=4,
        num_preemptions_total=5, num_prefix_queries_total=10, num_prefix_hits_total=5,
    )  # fmt: skip
    return EngineCoreOutputs(
        req_ids=["a"], num_new_tokens=[num_tokens], first_indices=[0], new_token_ids=[7] * num_tokens,
        num_scheduled_tokens=num_tokens, stats=stats,
    )  # fmt: skip


def test_gaps_between_tokens_are_taken_together() -> None:
    metrics = EngineMetrics()
    metrics.record_step(step(), {100.0: 3, 100.5: 1}, 101.0)
    assert metrics.inter_token_latency.count == 4
    assert metrics.inter_token_latency.sum == pytest.approx(3.5)
    assert metrics.stats is not None
    assert metrics.stats.kv_cache_usage == 0.25


def test_a_request_falls_into_queue_prefill_and_decode() -> None:
    metrics = EngineMetrics()
    times = RequestMetrics(
        arrival_time_s=10.0, first_scheduled_time_s=11.0, first_token_time_s=13.0, finished_time_s=17.0
    )
    metrics.record_end(times, 5, [("stop", 5), ("length", 3)])
    assert (metrics.queue_time.sum, metrics.prefill_time.sum, metrics.decode_time.sum) == (1.0, 2.0, 4.0)
    assert (metrics.duration.sum, metrics.time_per_output_token.sum) == (7.0, 1.0)
    assert (metrics.generation_tokens.sum, metrics.max_generation_tokens.sum) == (8.0, 5.0)
    assert metrics.finished == {"stop": 1, "length": 1}


def test_a_request_that_never_ran_has_no_times_of_running() -> None:
    metrics = EngineMetrics()
    metrics.record_end(RequestMetrics(arrival_time_s=1.0, finished_time_s=2.0), 5, [("abort", 0)])
    assert metrics.duration.count == 1
    assert metrics.queue_time.count == metrics.prefill_time.count == metrics.decode_time.count == 0


def test_the_load_is_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.metrics.log")
    metrics = EngineMetrics(stats_interval_s=10.0)
    for second in range(25):
        metrics.record_step(step(num_tokens=4), {}, 1000.0 + second)
    first, second_line = (record.getMessage() for record in caplog.records)
    assert "running=1 waiting=2" in first
    assert "generation_tokens_per_s=4.0" in second_line
    assert "kv_cache_usage=0.25" in first
    caplog.clear()
    silent = EngineMetrics(stats_interval_s=0.0)
    for second in range(25):
        silent.record_step(step(), {}, 1000.0 + second)
    assert not caplog.records


def test_a_real_run_adds_up() -> None:
    llm = LLM("demo", max_model_len=64, num_kv_blocks=64)
    params = SamplingParams(max_tokens=6, n=2, ignore_eos=True, temperature=1.0, seed=1)
    outputs = llm.generate(["one two three", "four"], params)
    metrics = llm.engine.front.outputs.metrics
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert metrics.num_prompt_tokens == metrics.prompt_tokens.sum == num_prompt_tokens
    assert metrics.num_generation_tokens == metrics.generation_tokens.sum == 2 * 2 * 6
    assert metrics.finished == {"length": 4}
    assert metrics.time_to_first_token.count == metrics.duration.count == metrics.queue_time.count == 2
    assert metrics.inter_token_latency.count == 4 * 5
    assert metrics.stats is not None
    assert (metrics.stats.num_running, metrics.stats.num_waiting) == (0, 0)
    llm.exit()
