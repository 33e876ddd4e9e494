"""Counts by adapter, from arrival to the end, and vLLM's gauge of them."""

from octavo.contracts.engine import AdapterEvents, AdapterRef, EngineCoreOutputs
from octavo.metrics.collect import AdapterMetrics, EngineMetrics
from octavo.metrics.prometheus import about_adapters, about_lora_requests
from octavo.testing import make_request


def test_requests_wait_run_and_end() -> None:
    metrics = EngineMetrics()
    adapters = metrics.adapters
    a, b = (
        make_request(name, [1], adapter=AdapterRef(name=name, path="", content_hash="", rank=1)) for name in ("a", "b")
    )
    for request in (a, a, b):
        metrics.record_arrival(request)
    metrics.record_start(a)
    [info] = next(iter(about_lora_requests(adapters, 4))).samples
    assert info.labels == {"max_lora": "4", "waiting_lora_adapters": "a,b", "running_lora_adapters": "a"}
    assert adapters.num_unfinished("a") == 2
    metrics.record_departure(a, has_run=True)
    metrics.record_departure(a, has_run=False)
    metrics.record_departure(b, has_run=False)
    assert not adapters.waiting
    assert not adapters.running
    events = AdapterEvents(loads={"a": 2}, evictions={"a": 1})
    metrics.record_step(EngineCoreOutputs(adapter_events=events), {}, 0.0)
    shown = {
        (sample.name, sample.labels["adapter"]): sample.value
        for family in about_adapters(adapters, {"model_name": "m"})
        for sample in family.samples
    }
    assert shown == {
        ("octavo_adapter_requests_total", "a"): 2,
        ("octavo_adapter_requests_total", "b"): 1,
        ("octavo_adapter_loads_total", "a"): 2,
        ("octavo_adapter_evictions_total", "a"): 1,
    }


def test_nothing_is_shown_without_adapters() -> None:
    assert not list(about_adapters(AdapterMetrics(), {}))
    assert not list(about_lora_requests(AdapterMetrics(), None))
