"""Metrics in Prometheus format, under our own names and, on request, under vLLM's for its dashboards and routers.

The tables below define all names. Values are read at scrape time; nothing is stored twice. Uses its own registry, so
that programs with metrics of their own are not affected.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from octavo.contracts.engine import ExpertLoad, SchedulerStats, SpecDecodeStats
from octavo.metrics.collect import AdapterMetrics, EngineMetrics, Histogram, HttpMetrics

# our name, vLLM's name (empty: none), help, source
_Gauge = tuple[str, str, str, Callable[[SchedulerStats], float]]
_GAUGES: tuple[_Gauge, ...] = (
    ("requests_running", "num_requests_running", "Samples running.", lambda s: s.num_running),
    ("requests_waiting", "num_requests_waiting", "Samples waiting in the engine.", lambda s: s.num_waiting),
    ("kv_cache_usage", "kv_cache_usage_perc", "Fraction of KV blocks in use.", lambda s: s.kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, str, Callable[[EngineMetrics, SchedulerStats], float]], ...] = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens.", lambda m, s: m.num_prompt_tokens),
    ("generation_tokens", "generation_tokens", "Output tokens.", lambda m, s: m.num_generation_tokens),
    ("engine_deaths", "", "Engine processes that died; their requests went on.", lambda m, s: m.num_core_deaths),
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
# Fields of `KeyUsage`.
_BY_KEY = {
    "requests": "Requests with a key, by its name.",
    "refused": "Of these, requests that were refused or ended by an error.",
    "prompt_tokens": "Prompt tokens of requests that have ended, by the key's name.",
    "output_tokens": "Output tokens of requests that have ended, by the key's name.",
}
# vLLM's labels for settings of ours.
_CACHE_LABELS = {
    "block_size": "block_size", "num_kv_blocks": "num_gpu_blocks_override", "kv_cache_dtype": "cache_dtype",
    "gpu_memory_utilization": "gpu_memory_utilization", "enable_prefix_caching": "enable_prefix_caching",
}  # fmt: skip


class MetricsPage(Collector):
    """What a scrape reads: what `collect` yields, and the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text and its content type, in the newest format that the `Accept` header allows."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class Exposition(MetricsPage):
    """All metrics of one server. A model may have thousands of experts, whose series would dominate a scrape."""

    def __init__(
        self,
        http: HttpMetrics,
        engine: Callable[[], EngineMetrics | None],
        model_name: str,
        *,
        with_vllm_names: bool,
        with_each_expert: bool = False,
    ) -> None:
        self._http, self._engine, self._model_name = http, engine, model_name
        self._with_vllm_names, self._with_each_expert = with_vllm_names, with_each_expert
        super().__init__()  # a registry looks at once

    def collect(self) -> Iterator[Metric]:
        """Yield everything; called by the registry for each scrape."""
        yield from _about_http(self._http)
        engine = self._engine()
        if engine is None:
            return
        labels = {"model_name": self._model_name}
        drafts = list(engine.spec_decode_by_replica.values())
        yield from _about_engine(engine, "octavo_", 0, labels)
        yield _ends("octavo_requests_finished", "reason", engine, labels)
        if engine.stats is not None and engine.stats.deferred:
            text, held = "Of the samples waiting in the engine, those that a gate holds.", engine.stats.deferred.items()
            yield _family(GaugeMetricFamily, "octavo_requests_held", text, labels, sorted(held), ["reason"])
        yield from about_prefixes_on_disk(engine.stats or SchedulerStats(), labels)
        yield from _about_replicas(engine, labels)
        yield from _about_drafts(drafts, "octavo_", labels)
        yield from _about_experts(engine.expert_load_by_replica.values(), labels, self._with_each_expert)
        yield from about_adapters(engine.adapters, labels)
        if self._with_vllm_names:
            labels = {**labels, "engine": "0"}
            yield from _about_engine(engine, "vllm:", 1, labels)
            yield _ends("vllm:request_success", "finished_reason", engine, labels)
            yield from _about_vllm(engine, self._http, labels)
            yield from _about_drafts(drafts, "vllm:", labels)
            yield from about_lora_requests(engine.adapters, engine.max_loras)


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Mapping[str, str],
    values: float | Iterable[tuple[object, float]],
    by: Sequence[str] = (),
) -> Metric:
    """Return a metric with one value, or one for each value of the labels `by`: a tuple if there are several."""
    family = kind(name, text, labels=[*labels, *by])
    for at, value in [((), values)] if isinstance(values, (int, float)) else values:
        family.add_metric([*labels.values(), *map(str, at if isinstance(at, tuple) else (at,))], value)
    return family


def _counters(name: str, text: str, by: str, counts: Mapping[Any, int], labels: Mapping[str, str]) -> Metric:
    return _family(CounterMetricFamily, name, text, labels, sorted(counts.items()), [by])


def _about_http(http: HttpMetrics) -> Iterator[Metric]:
    yield InfoMetricFamily("octavo_build", "What is running.", value={"version": __version__})
    in_flight = "Requests without a complete response."
    yield _family(GaugeMetricFamily, "octavo_http_requests_in_flight", in_flight, {}, http.num_in_flight)
    yield _counters("octavo_http_responses", "Responses.", "status", http.responses, {})
    yield _counters("octavo_requests_rejected", "Requests rejected or aborted by errors.", "cause", http.rejections, {})
    yield _counters("octavo_batch_lines", "Lines of batches with a result.", "outcome", http.batch_lines, {})
    yield _family(CounterMetricFamily, "octavo_client_aborts", "Early client disconnects.", {}, http.num_client_aborts)
    sent = "Bytes of response bodies sent."
    yield _family(CounterMetricFamily, "octavo_http_sent_bytes", sent, {}, http.num_bytes_sent)
    resumed = "Clients that came back for the rest of a stream."
    yield _family(CounterMetricFamily, "octavo_streams_resumed", resumed, {}, http.num_resumed)
    replayed = "Clients that came back with the key of an answer."
    yield _family(CounterMetricFamily, "octavo_answers_replayed", replayed, {}, http.num_replayed)
    kept = "Memory of answers whose clients may come back."
    yield _family(GaugeMetricFamily, "octavo_kept_answers_bytes", kept, {}, http.num_kept_bytes)
    if http.by_key:
        for name, text in _BY_KEY.items():
            counts = {key: getattr(usage, name) for key, usage in http.by_key.items()}
            yield _counters(f"octavo_key_{name}", text, "key", counts, {})


def _about_engine(engine: EngineMetrics, prefix: str, column: int, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield everything that has a name in this column of the tables."""
    stats = engine.stats or SchedulerStats()
    for *titles, text, of_stats in _GAUGES:
        yield _family(GaugeMetricFamily, f"{prefix}{titles[column]}", text, labels, of_stats(stats))
    for *titles, text, of_both in _COUNTERS:
        if titles[column]:
            yield _family(CounterMetricFamily, f"{prefix}{titles[column]}", text, labels, of_both(engine, stats))
    for *titles, text, of_engine in _HISTOGRAMS:
        if titles[column]:
            family = HistogramMetricFamily(f"{prefix}{titles[column]}", text, labels=list(labels))
            histogram = of_engine(engine)
            bounds = [("+Inf" if end == float("inf") else str(end), n) for end, n in histogram.cumulative(column)]
            family.add_metric(list(labels.values()), bounds, histogram.sum)
            yield family


def about_prefixes_on_disk(stats: SchedulerStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield what is counted about the part of the prefix cache that survives a restart."""
    prefix = "octavo_prefix_cache_disk_"
    hits, written = stats.num_prefix_disk_hits_total, stats.num_prefix_disk_saved_total
    yield _family(CounterMetricFamily, f"{prefix}hits", "Of the tokens found, those read from disk.", labels, hits)
    yield _family(CounterMetricFamily, f"{prefix}blocks_written", "KV blocks written to disk.", labels, written)
    text = "Blocks or files that were not used, by what was wrong."
    yield _counters(f"{prefix}failures", text, "reason", stats.prefix_disk_failures, labels)
    yield _family(GaugeMetricFamily, f"{prefix}bytes", "KV blocks on disk.", labels, stats.prefix_disk_bytes)


def _about_replicas(engine: EngineMetrics, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the gauges of each replica if there are several; those above are totals."""
    if len(engine.stats_by_replica) < 2:
        return
    up: _Gauge = ("up", "", "1 while the replica is alive.", lambda stats: float(stats.num_blocks > 0))
    for title, _, text, of_stats in (up, *_GAUGES):
        of_replicas = [(replica, of_stats(stats)) for replica, stats in sorted(engine.stats_by_replica.items())]
        yield _family(GaugeMetricFamily, f"octavo_replica_{title}", text, labels, of_replicas, ["replica"])


def _ends(name: str, by: str, engine: EngineMetrics, labels: Mapping[str, str]) -> Metric:
    counts = [(reason, engine.finished[reason]) for reason in ("stop", "length", "abort", "error")]
    return _family(CounterMetricFamily, name, "Finished samples by reason.", labels, counts, [by])


def _about_drafts(parts: Sequence[SpecDecodeStats], prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the counts summed over replicas, with vLLM's names after the prefix; nothing without a drafter."""
    if not parts:
        return
    total, prefix = SpecDecodeStats.sum(parts), f"{prefix}spec_decode_"
    for name, text, count in (
        ("drafts", "Drafts, of one or more tokens each.", total.num_drafts),
        ("draft_tokens", "Draft tokens verified.", sum(total.proposed)),
        ("accepted_tokens", "Draft tokens accepted.", sum(total.accepted)),
    ):
        yield _family(CounterMetricFamily, f"{prefix}num_{name}", text, labels, count)
    by_position = [("accepted", "accepted", total.accepted)]
    if prefix.startswith("octavo_"):  # vLLM has no such names
        text = "Seconds that a draft model took."
        yield _family(CounterMetricFamily, f"{prefix}draft_seconds", text, labels, total.draft_s)
        # The number of drafts adapts, so that later positions are verified less often than there are drafts.
        by_position.insert(0, ("draft", "verified", total.proposed))
    for name, what, counts in by_position:
        full_name, text = f"{prefix}num_{name}_tokens_per_pos", f"Draft tokens {what}, by position in the draft."
        yield _family(CounterMetricFamily, full_name, text, labels, enumerate(counts), ["position"])


def _about_experts(loads: Iterable[ExpertLoad], labels: Mapping[str, str], with_each: bool) -> Iterator[Metric]:
    """Yield the load summed over replicas, three values per layer; nothing for models without experts."""
    totals: dict[int, list[int]] = {}
    for load in loads:
        for layer, counts in load.of_layers().items():
            totals[layer] = [a + b for a, b in zip(totals.get(layer, [0] * len(counts)), counts, strict=True)]
    if not totals:
        return
    layers = [(layer, counts, sum(counts)) for layer, counts in sorted(totals.items())]
    choices = [(layer, total) for layer, _, total in layers]
    busiest = [(layer, max(counts) * len(counts) / total if total else 1.0) for layer, counts, total in layers]
    unchosen = [(layer, counts.count(0)) for layer, counts, _ in layers]
    for kind, name, text, values in (
        (CounterMetricFamily, "octavo_expert_choices", "Expert choices; each token makes several.", choices),
        (GaugeMetricFamily, "octavo_expert_busiest_ratio", "Load of the busiest expert over the mean; 1 is balanced.",
         busiest),
        (GaugeMetricFamily, "octavo_experts_unchosen", "Experts that no token has chosen.", unchosen),
    ):  # fmt: skip
        yield _family(kind, name, text, labels, values, ["layer"])
    if with_each:
        each = [((layer, expert), count) for layer, counts, _ in layers for expert, count in enumerate(counts)]
        text = "Tokens that chose the expert."
        yield _family(CounterMetricFamily, "octavo_expert_tokens", text, labels, each, ["layer", "expert"])


def about_adapters(adapters: AdapterMetrics, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield our own counts; nothing before the first request with an adapter."""
    for name, text, counts in (
        ("requests", "Requests that have ended.", adapters.requests),
        ("loads", "Loads into host memory.", adapters.loads),
        ("evictions", "Evictions from host memory.", adapters.evictions),
    ):
        if counts:
            yield _counters(f"octavo_adapter_{name}", text, "adapter", counts, labels)
    if unfinished := sorted((adapters.waiting + adapters.running).items()):
        name, text = "octavo_adapter_unfinished", "Requests in the engine."
        yield _family(GaugeMetricFamily, name, text, labels, unfinished, ["adapter"])


def about_lora_requests(adapters: AdapterMetrics, max_loras: int | None) -> Iterator[Metric]:
    """Yield vLLM's gauge, which has its message in its labels and the time as its value; nothing without adapters."""
    if max_loras is not None:
        info = {
            "max_lora": str(max_loras),
            "waiting_lora_adapters": ",".join(sorted(adapters.waiting)),
            "running_lora_adapters": ",".join(sorted(adapters.running)),
        }
        text = "Adapters of requests in the engine."
        yield _family(GaugeMetricFamily, "vllm:lora_requests_info", text, info, time.time())


def _about_vllm(engine: EngineMetrics, http: HttpMetrics, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield what vLLM's newer dashboards read: settings of the KV cache, waiting samples, requests by route."""
    stats = engine.stats or SchedulerStats()
    settings = {label: engine.cache_info[name] for name, label in _CACHE_LABELS.items() if name in engine.cache_info}
    info = {"engine": labels["engine"], "num_gpu_blocks": str(stats.num_blocks), **settings}
    yield _family(GaugeMetricFamily, "vllm:cache_config_info", "Settings of the KV cache.", info, 1.0)
    held = sum(stats.deferred.values())
    waiting = [("capacity", stats.num_waiting - held), ("deferred", held)]
    name, text = "vllm:num_requests_waiting_by_reason", "Samples waiting in the engine."
    yield _family(GaugeMetricFamily, name, text, labels, waiting, ["reason"])
    routes = [((method, status, handler), n) for (method, handler, status), n in sorted(http.requests.items())]
    yield _family(CounterMetricFamily, "http_requests", "HTTP requests.", {}, routes, ["method", "status", "handler"])
