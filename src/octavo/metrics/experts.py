"""Expert load in Prometheus format: three values per layer and, on request, one per expert.

A model may have thousands of experts, whose series would dominate a scrape.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo.contracts.engine import ExpertLoad


def about_experts(
    loads: Iterable[ExpertLoad], labels: Mapping[str, str], *, with_each_expert: bool
) -> Iterator[Metric]:
    """Yield the load summed over replicas; nothing for models without experts."""
    by_layer = _sum(loads)
    if not by_layer:
        return
    names, values = [*labels, "layer"], list(labels.values())
    choices = CounterMetricFamily("octavo_expert_choices", "Expert choices; each token makes several.", labels=names)
    busiest = GaugeMetricFamily(
        "octavo_expert_busiest_ratio", "Load of the busiest expert over the mean; 1 is balanced.", labels=names
    )
    unchosen = GaugeMetricFamily("octavo_experts_unchosen", "Experts that no token has chosen.", labels=names)
    for layer, counts in sorted(by_layer.items()):
        of_layer, total = [*values, str(layer)], sum(counts)
        choices.add_metric(of_layer, total)
        busiest.add_metric(of_layer, max(counts) * len(counts) / total if total else 1.0)
        unchosen.add_metric(of_layer, counts.count(0))
    yield from (choices, busiest, unchosen)
    if with_each_expert:
        each = CounterMetricFamily("octavo_expert_tokens", "Tokens that chose the expert.", labels=[*names, "expert"])
        for layer, counts in sorted(by_layer.items()):
            for expert, count in enumerate(counts):
                each.add_metric([*values, str(layer), str(expert)], count)
        yield each


def _sum(loads: Iterable[ExpertLoad]) -> dict[int, list[int]]:
    totals: dict[int, list[int]] = {}
    for load in loads:
        for layer, counts in load.of_layers().items():
            totals[layer] = [a + b for a, b in zip(totals.get(layer, [0] * len(counts)), counts, strict=True)]
    return totals
