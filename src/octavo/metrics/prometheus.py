"""Metrics in Prometheus format, under our own names and, on request, under vLLM's for its dashboards and routers.

The tables below define all names. Values are read at scrape time; nothing is stored twice. Uses its own registry, so
that programs with metrics of their own are not affected.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from octavo._version import __version__
from octavo.contracts.engine import SchedulerStats
from octavo.metrics.adapters import about_adapters, about_lora_requests
from octavo.metrics.collect import EngineMetrics
from octavo.metrics.experts import about_experts
from octavo.metrics.histogram import Histogram
from octavo.metrics.http import HttpMetrics
from octavo.metrics.spec_decode import about_drafts
from octavo.metrics.vllm import about_vllm

_NOTHING_YET = SchedulerStats()

# our name, vLLM's name (empty: none), help, source
_GAUGES: tuple[tuple[str, str, str, Callable[[SchedulerStats], float]], ...] = (
    ("requests_running", "num_requests_running", "Samples running.", lambda s: s.num_running),
    ("requests_waiting", "num_requests_waiting", "Samples waiting in the engine.", lambda s: s.num_waiting),
    ("kv_cache_usage", "kv_cache_usage_perc", "Fraction of KV blocks in use.", lambda s: s.kv_cache_usage),
)
_UP: tuple[str, str, str, Callable[[SchedulerStats], float]] = (
    "up", "", "1 while the replica is alive.", lambda s: float(s.num_blocks > 0)
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, str, Callable[[EngineMetrics, SchedulerStats], float]], ...] = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens.", lambda m, s: m.num_prompt_tokens),
    ("generation_tokens", "generation_tokens", "Output tokens.", lambda m, s: m.num_generation_tokens),
    ("preemptions", "num_preemptions", "Preempted samples.", lambda m, s: s.num_preemptions_total),
    ("step_seconds", "", "Seconds of steps, from output to output while there is work.", lambda m, s: s.step_s_total),
    ("step_compute_seconds", "", "Of these, seconds in native calls.", lambda m, s: s.compute_s_total),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
     lambda m, s: s.num_prefix_queries_total),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in it.", lambda m, s: s.num_prefix_hits_total),
    ("", "prompt_tokens_cached", "Prompt tokens found in the prefix cache.", lambda m, s: s.num_prefix_hits_total),
)  # fmt: skip
_HISTOGRAMS: tuple[tuple[str, str, str, Callable[[EngineMetrics], Histogram]], ...] = (
    ("time_to_first_token_seconds", "time_to_first_token_seconds", "From arrival to the first token.",
     lambda m: m.time_to_first_token),
    ("inter_token_latency_seconds", "inter_token_latency_seconds", "Between two tokens of a sample.",
     lambda m: m.inter_token_latency),
    ("request_time_per_output_token_seconds", "request_time_per_output_token_seconds",
     "Mean time between tokens, by request.", lambda m: m.time_per_output_token),
    ("", "time_per_output_token_seconds", "Between two tokens of a sample; the older name.",
     lambda m: m.inter_token_latency),
    ("", "time_per_prefill_token_request_seconds", "Mean time per prompt token, by request.",
     lambda m: m.time_per_prefill_token),
    ("", "request_inference_time_seconds", "From the first step to the end.", lambda m: m.inference_time),
    ("", "request_params_n", "Samples of a request.", lambda m: m.num_samples),
    ("", "request_params_max_tokens", "Tokens allowed to a request.", lambda m: m.max_tokens),
    ("request_duration_seconds", "e2e_request_latency_seconds", "From arrival to the end.", lambda m: m.duration),
    ("request_queue_seconds", "request_queue_time_seconds", "From arrival to the first step.", lambda m: m.queue_time),
    ("request_prefill_seconds", "request_prefill_time_seconds", "From the first step to the first token.",
     lambda m: m.prefill_time),
    ("request_decode_seconds", "request_decode_time_seconds", "From the first token to the end.",
     lambda m: m.decode_time),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens, by request.", lambda m: m.prompt_tokens),
    ("request_generation_tokens", "request_generation_tokens", "Output tokens, by sample.",
     lambda m: m.generation_tokens),
    ("request_max_generation_tokens", "request_max_num_generation_tokens", "Output tokens of the longest sample.",
     lambda m: m.max_generation_tokens),
    ("step_tokens", "iteration_tokens_total", "Tokens computed in a step.", lambda m: m.step_tokens),
)  # fmt: skip


class Exposition:
    """All metrics of one server."""

    def __init__(
        self,
        http: HttpMetrics,
        engine: Callable[[], EngineMetrics | None],
        model_name: str,
        *,
        with_vllm_names: bool,
        with_each_expert: bool = False,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(http, engine, model_name, with_vllm_names, with_each_expert))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text and its content type, in the newest format that the `Accept` header allows."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Collector(Collector):
    def __init__(
        self,
        http: HttpMetrics,
        engine: Callable[[], EngineMetrics | None],
        model_name: str,
        with_vllm_names: bool,
        with_each_expert: bool,
    ) -> None:
        self._http = http
        self._engine = engine
        self._model_name = model_name
        self._with_vllm_names = with_vllm_names
        self._with_each_expert = with_each_expert

    def collect(self) -> Iterator[Metric]:
        yield from self._about_http()
        engine = self._engine()
        if engine is not None:
            yield from _about_engine(engine, "octavo_", 0, {"model_name": self._model_name})
            yield _ends("octavo_requests_finished", "reason", engine, {"model_name": self._model_name})
            yield from _about_replicas(engine, {"model_name": self._model_name})
            drafts = list(engine.spec_decode_by_replica.values())
            yield from about_drafts(drafts, "octavo_", {"model_name": self._model_name})
            loads = list(engine.expert_load_by_replica.values())
            yield from about_experts(loads, {"model_name": self._model_name}, with_each_expert=self._with_each_expert)
            yield from about_adapters(engine.adapters, {"model_name": self._model_name})
            if self._with_vllm_names:
                labels = {"model_name": self._model_name, "engine": "0"}
                yield from _about_engine(engine, "vllm:", 1, labels)
                yield _ends("vllm:request_success", "finished_reason", engine, labels)
                yield from about_vllm(engine, self._http, labels)
                yield from about_drafts(drafts, "vllm:", labels)
                yield from about_lora_requests(engine.adapters, engine.max_loras)

    def _about_http(self) -> Iterator[Metric]:
        http = self._http
        yield InfoMetricFamily("octavo_build", "What is running.", value={"version": __version__})
        yield GaugeMetricFamily("octavo_http_requests_in_flight", "Requests without a complete response.",
                                value=http.num_in_flight)  # fmt: skip
        yield _counted("octavo_http_responses", "Responses.", "status", http.responses)
        yield _counted("octavo_requests_rejected", "Requests rejected or aborted by errors.", "cause", http.rejections)
        yield CounterMetricFamily("octavo_client_aborts", "Early client disconnects.", value=http.num_client_aborts)
        yield CounterMetricFamily("octavo_http_sent_bytes", "Bytes of response bodies sent.", value=http.num_bytes_sent)


def _about_engine(engine: EngineMetrics, prefix: str, column: int, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield everything that has a name in this column of the tables."""
    stats = engine.stats or _NOTHING_YET
    names, values = list(labels), list(labels.values())
    for *titles, text, of_stats in _GAUGES:
        gauge = GaugeMetricFamily(f"{prefix}{titles[column]}", text, labels=names)
        gauge.add_metric(values, of_stats(stats))
        yield gauge
    for *titles, text, of_both in _COUNTERS:
        if not titles[column]:
            continue
        counter = CounterMetricFamily(f"{prefix}{titles[column]}", text, labels=names)
        counter.add_metric(values, of_both(engine, stats))
        yield counter
    for *titles, text, of_engine in _HISTOGRAMS:
        if not titles[column]:
            continue
        family = HistogramMetricFamily(f"{prefix}{titles[column]}", text, labels=names)
        histogram = of_engine(engine)
        buckets = [("+Inf" if bound == float("inf") else str(bound), n) for bound, n in histogram.cumulative(column)]
        family.add_metric(values, buckets, histogram.sum)
        yield family


def _about_replicas(engine: EngineMetrics, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the gauges of each replica if there are several; those above are totals."""
    if len(engine.stats_by_replica) < 2:
        return
    for title, _, text, of_stats in (_UP, *_GAUGES):
        gauge = GaugeMetricFamily(f"octavo_replica_{title}", text, labels=[*labels, "replica"])
        for replica, stats in sorted(engine.stats_by_replica.items()):
            gauge.add_metric([*labels.values(), str(replica)], of_stats(stats))
        yield gauge


def _ends(name: str, label: str, engine: EngineMetrics, labels: Mapping[str, str]) -> Metric:
    family = CounterMetricFamily(name, "Finished samples by reason.", labels=[*labels, label])
    for reason in ("stop", "length", "abort", "error"):
        family.add_metric([*labels.values(), reason], engine.finished[reason])
    return family


def _counted(name: str, text: str, label: str, counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([str(value)], count)
    return family
