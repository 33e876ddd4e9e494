"""The dashboard for Grafana asks for metrics and labels that a scrape shows."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.server.test_operations_guide import engine_with_all

from octavo.metrics.collect import HttpMetrics
from octavo.metrics.prometheus import Exposition

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy/grafana-dashboard.json").read_text(encoding="utf-8")
)
SET_BY_PROMETHEUS = {"instance", "le"}


def shown() -> dict[str, set[str]]:
    """Return the samples of a scrape, with the labels of each."""
    http = HttpMetrics()
    http.responses[200] = http.rejections["queue_full"] = 1
    text, _ = Exposition(http, engine_with_all, "m", with_vllm_names=False).render()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_queries_are_of_metrics_that_there_are() -> None:
    known = shown()
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"\b(?:octavo|process)_\w+", query)
        assert names, query
        assert {*names} <= {*known}, query
        labels = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r"[, ]+", group)}
        legends = set(re.findall(r"{{(\w+)}}", json.dumps(DASHBOARD)))
        assert labels | legends <= SET_BY_PROMETHEUS | set().union(*(known[name] for name in known)), query
        for name in names:
            used = labels - SET_BY_PROMETHEUS
            assert used <= known[name], query


def test_it_is_one_that_grafana_imports() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len({*ids})
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert {*re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))} - {"__rate_interval"} == variables
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(places) == len({*places})
