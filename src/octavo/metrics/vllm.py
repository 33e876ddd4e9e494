"""Metrics that vLLM's newer dashboards and routers read, in addition to our own under vLLM's names."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.metrics.collect import EngineMetrics
from octavo.metrics.http import HttpMetrics

# vLLM's labels for settings of ours.
_CACHE_LABELS = {
    "block_size": "block_size", "num_kv_blocks": "num_gpu_blocks_override", "kv_cache_dtype": "cache_dtype",
    "gpu_memory_utilization": "gpu_memory_utilization", "enable_prefix_caching": "enable_prefix_caching",
}  # fmt: skip


def about_vllm(engine: EngineMetrics, http: HttpMetrics, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the KV cache's settings, waiting samples by reason, and HTTP requests by route."""
    num_blocks = engine.stats.num_blocks if engine.stats is not None else 0
    settings = {_CACHE_LABELS[name]: value for name, value in engine.cache_info.items()}
    info = {"engine": labels["engine"], "num_gpu_blocks": str(num_blocks), **settings}
    cache = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=list(info))
    cache.add_metric(list(info.values()), 1.0)
    yield cache
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Samples waiting in the engine.", labels=[*labels, "reason"]
    )
    stats = engine.stats
    deferred = 0 if stats is None else sum(stats.deferred.values())
    waiting.add_metric([*labels.values(), "capacity"], (0 if stats is None else stats.num_waiting) - deferred)
    waiting.add_metric([*labels.values(), "deferred"], deferred)
    yield waiting
    requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=["method", "status", "handler"])
    for (method, handler, status), count in sorted(http.requests.items()):
        requests.add_metric([method, status, handler], count)
    yield requests
