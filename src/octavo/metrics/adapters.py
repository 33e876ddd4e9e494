"""Adapters: requests for each, and its loads into and evictions from the ranks' host caches."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.contracts.engine import AdapterEvents


class AdapterMetrics:
    """Counts by the adapters' names. Owned by the thread that processes outputs."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # that have ended
        self.loads: Counter[str] = Counter()  # into the host caches
        self.evictions: Counter[str] = Counter()  # from them
        self.waiting: Counter[str] = Counter()  # requests of which nothing has run yet
        self.running: Counter[str] = Counter()

    def record_arrival(self, name: str) -> None:
        self.waiting[name] += 1

    def record_start(self, name: str) -> None:
        _count_down(self.waiting, name)
        self.running[name] += 1

    def record_end(self, name: str, *, has_run: bool) -> None:
        _count_down(self.running if has_run else self.waiting, name)
        self.requests[name] += 1

    def record_events(self, events: AdapterEvents) -> None:
        self.loads.update(events.loads)
        self.evictions.update(events.evictions)

    def num_unfinished(self, name: str) -> int:
        return self.waiting[name] + self.running[name]


def _count_down(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def about_adapters(adapters: AdapterMetrics, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield our own counts; nothing before the first request with an adapter."""
    unfinished = adapters.waiting + adapters.running
    for name, text, counts in (
        ("requests", "Requests that have ended.", adapters.requests),
        ("loads", "Loads into host memory.", adapters.loads),
        ("evictions", "Evictions from host memory.", adapters.evictions),
    ):
        if counts:
            counter = CounterMetricFamily(f"octavo_adapter_{name}", text, labels=[*labels, "adapter"])
            for adapter, count in sorted(counts.items()):
                counter.add_metric([*labels.values(), adapter], count)
            yield counter
    if unfinished:
        gauge = GaugeMetricFamily("octavo_adapter_unfinished", "Requests in the engine.", labels=[*labels, "adapter"])
        for adapter, count in sorted(unfinished.items()):
            gauge.add_metric([*labels.values(), adapter], count)
        yield gauge


def about_lora_requests(adapters: AdapterMetrics, max_loras: int | None) -> Iterator[Metric]:
    """Yield vLLM's gauge, which has its message in its labels and the time as its value; nothing without adapters."""
    if max_loras is None:
        return
    info = {
        "max_lora": str(max_loras),
        "waiting_lora_adapters": ",".join(sorted(adapters.waiting)),
        "running_lora_adapters": ",".join(sorted(adapters.running)),
    }
    gauge = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of requests in the engine.", labels=list(info))
    gauge.add_metric(list(info.values()), time.time())
    yield gauge
