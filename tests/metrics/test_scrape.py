"""Two scrapes of a server: rates, quantiles, and a server that was started anew in between."""

import pytest

from octavo.metrics.collect import EngineMetrics, HttpMetrics
from octavo.metrics.prometheus import Exposition
from octavo.metrics.scrape import Change, Scrape


def scrape(engine: EngineMetrics, time_s: float) -> Scrape:
    text, _ = Exposition(HttpMetrics(), lambda: engine, "m", with_vllm_names=False).render()
    return Scrape.of(text.decode(), time_s)


def test_rates_and_quantiles_are_of_what_is_new() -> None:
    engine = EngineMetrics()
    engine.num_generation_tokens = 100
    engine.time_to_first_token.observe(100.0, 1000)  # before: counts no more
    before = scrape(engine, 10.0)
    engine.num_generation_tokens = 300
    engine.time_to_first_token.observe(0.2, 99)
    engine.time_to_first_token.observe(3.0)
    change = Change(before, scrape(engine, 12.0))
    assert change.rate("octavo_generation_tokens_total") == 100.0
    median = change.quantile("octavo_time_to_first_token_seconds", 0.5)
    assert median is not None
    assert 0.1 < median <= 0.25
    last = change.quantile("octavo_time_to_first_token_seconds", 0.995)
    assert last is not None
    assert 2.0 < last <= 5.0
    assert change.quantile("octavo_inter_token_latency_seconds", 0.5) is None
    assert change.after.label("model_name") == "m"


def test_a_server_that_was_started_anew_begins_with_zeros() -> None:
    engine = EngineMetrics()
    engine.num_generation_tokens = 100
    before = scrape(engine, 1.0)
    engine.num_generation_tokens = 40
    assert Change(before, scrape(engine, 2.0)).grown("octavo_generation_tokens_total") == 40


def test_labels() -> None:
    found = Scrape.of('# TYPE a counter\na_total{x="1",y="2"} 3\na_total{x="1",y="4"} 5\na_total{x="2",y="2"} 7\n', 0.0)
    assert found.by("a_total", "x") == {"1": 8.0, "2": 7.0}
    assert found.total("a_total") == 15.0
    assert not found.has("b")
    with pytest.raises(ValueError, match=r"."):
        Scrape.of("<html>", 0.0)
