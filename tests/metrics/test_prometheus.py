"""What a scrape shows: names, labels, buckets, and that vLLM's names are all there when asked for."""

from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from octavo.contracts.engine import SchedulerStats
from octavo.metrics.collect import EngineMetrics, HttpMetrics
from octavo.metrics.prometheus import Exposition
from octavo.outputs import RequestMetrics

# What vLLM's three dashboards and the routers that know it read.
VLLM_SAMPLES = {
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum", "inter_token_latency_seconds_count",
    "generation_tokens_total", "prompt_tokens_total", "request_success_total", "num_requests_running",
    "num_requests_waiting", "kv_cache_usage_perc", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum", "iteration_tokens_total_count", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "request_time_per_output_token_seconds_sum", "num_preemptions_total",
    "request_params_n_bucket", "request_params_max_tokens_sum", "request_inference_time_seconds_sum",
    "time_per_output_token_seconds_bucket", "time_per_prefill_token_request_seconds_sum", "cache_config_info",
    "num_requests_waiting_by_reason", "prompt_tokens_cached_total",
}  # fmt: skip

VLLM_LABELS = (("engine", "0"), ("model_name", "m"))


def samples(exposition: Exposition) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text, _ = exposition.render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def busy() -> tuple[HttpMetrics, EngineMetrics]:
    http, engine = HttpMetrics(), EngineMetrics(cache_info={"block_size": "16"})
    held = {"grammar": 1}
    engine.stats = SchedulerStats(num_waiting=3, deferred=held, num_blocks=5, step_s_total=2.0, compute_s_total=1.5)
    http.requests["GET", "/health", "2xx"] = 4
    http.responses.update({200: 3, 429: 1})
    http.rejections.update({"queue_full": 1})
    http.num_client_aborts = 2
    engine.record_first_token(1.0, 7, 1.3)
    engine.record_end(
        RequestMetrics(arrival_time_s=1.0, first_token_time_s=1.3, finished_time_s=2.0), 7, [("stop", 9)], 32
    )
    return http, engine


def test_our_own_names() -> None:
    http, engine = busy()
    exposition = Exposition(http, lambda: engine, "m", with_vllm_names=False)
    shown = samples(exposition)
    model = ("model_name", "m")
    assert shown["octavo_http_responses_total", (("status", "200"),)] == 3
    assert shown["octavo_requests_rejected_total", (("cause", "queue_full"),)] == 1
    assert [shown[f"octavo_step_{name}_total", (model,)] for name in ("seconds", "compute_seconds")] == [2.0, 1.5]
    assert shown["octavo_client_aborts_total", ()] == 2
    assert shown["octavo_prompt_tokens_total", (model,)] == 7
    assert shown["octavo_requests_finished_total", (model, ("reason", "stop"))] == 1
    assert shown["octavo_requests_finished_total", (model, ("reason", "error"))] == 0
    assert shown["octavo_time_to_first_token_seconds_count", (model,)] == 1
    assert shown["octavo_time_to_first_token_seconds_bucket", (("le", "0.25"), model)] == 0
    assert shown["octavo_time_to_first_token_seconds_bucket", (("le", "0.5"), model)] == 1
    assert shown["octavo_time_to_first_token_seconds_bucket", (("le", "+Inf"), model)] == 1
    assert shown["octavo_kv_cache_usage", (model,)] == 1.0
    assert not any(name.startswith("vllm:") for name, _ in shown)


def test_samples_that_a_gate_holds_are_shown_by_reason() -> None:
    http, engine = busy()
    shown = samples(Exposition(http, lambda: engine, "m", with_vllm_names=False))
    assert shown["octavo_requests_held", (("model_name", "m"), ("reason", "grammar"))] == 1


def test_vllms_names_are_there_when_asked_for() -> None:
    http, engine = busy()
    exposition = Exposition(http, lambda: engine, "m", with_vllm_names=True)
    shown = samples(exposition)
    assert {f"vllm:{name}" for name in VLLM_SAMPLES} <= {name for name, _ in shown}
    labels = (("engine", "0"), ("finished_reason", "stop"), ("model_name", "m"))
    assert shown["vllm:request_success_total", labels] == 1
    assert shown["http_requests_total", (("handler", "/health"), ("method", "GET"), ("status", "2xx"))] == 4
    assert shown["vllm:request_params_max_tokens_sum", VLLM_LABELS] == 32
    info = dict(next(labels for name, labels in shown if name == "vllm:cache_config_info"))
    assert info == {"engine": "0", "block_size": "16", "num_gpu_blocks": "5"}
    assert shown["vllm:num_requests_waiting_by_reason", (*VLLM_LABELS, ("reason", "capacity"))] == 2
    assert shown["vllm:num_requests_waiting_by_reason", (*VLLM_LABELS, ("reason", "deferred"))] == 1


def test_under_vllms_names_the_buckets_are_its_own() -> None:
    http, engine = busy()
    shown = samples(Exposition(http, lambda: engine, "m", with_vllm_names=True))
    bounds = {
        name: [dict(labels)["le"] for found, labels in shown if found == f"{name}_bucket"]
        for name in ("vllm:e2e_request_latency_seconds", "octavo_request_duration_seconds", "vllm:request_params_n")
    }
    assert bounds["vllm:e2e_request_latency_seconds"][:4] == ["0.3", "0.5", "0.8", "1.0"]
    assert bounds["octavo_request_duration_seconds"][:3] == ["0.01", "0.025", "0.05"]
    assert bounds["vllm:request_params_n"] == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
    latency = "vllm:e2e_request_latency_seconds_bucket"
    at = {dict(labels)["le"]: value for (name, labels), value in shown.items() if name == latency}
    assert (at["0.8"], at["1.0"], at["+Inf"]) == (0, 1, 1)


def test_there_is_something_to_see_while_the_model_loads() -> None:
    names = {name for name, _ in samples(Exposition(HttpMetrics(), lambda: None, "m", with_vllm_names=True))}
    assert "octavo_build_info" in names
    assert "octavo_requests_running" not in names


def test_openmetrics_for_those_who_ask() -> None:
    http, engine = busy()
    exposition = Exposition(http, lambda: engine, "m", with_vllm_names=True)
    text, content_type = exposition.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = parse_openmetrics(text.decode())  # type: ignore[no-untyped-call]
    assert {family.name for family in families} > {"octavo_time_to_first_token_seconds"}


def test_the_registry_of_other_programs_is_left_alone() -> None:
    Exposition(HttpMetrics(), lambda: None, "m", with_vllm_names=True)
    assert not any(family.name.startswith(("octavo", "vllm")) for family in REGISTRY.collect())


def test_prefixes_on_disk_are_counted_over_replicas() -> None:
    http, engine = busy()
    parts = [
        SchedulerStats(num_prefix_disk_hits_total=96, num_prefix_disk_saved_total=3, prefix_disk_bytes=4096),
        SchedulerStats(num_prefix_disk_hits_total=4, prefix_disk_bytes=1, prefix_disk_failures={"damaged": 2}),
    ]
    engine.stats = SchedulerStats.sum(parts)
    shown = samples(Exposition(http, lambda: engine, "m", with_vllm_names=False))
    model, prefix = ("model_name", "m"), "octavo_prefix_cache_disk_"
    counts = [shown[f"{prefix}{name}", (model,)] for name in ("hits_total", "blocks_written_total", "bytes")]
    assert counts == [100, 3, 4097]
    assert shown[f"{prefix}failures_total", (model, ("reason", "damaged"))] == 2
