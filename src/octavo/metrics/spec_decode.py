"""Speculative decoding in Prometheus format."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from octavo.contracts.engine import SpecDecodeStats


def about_drafts(parts: Sequence[SpecDecodeStats], prefix: str, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the counts summed over replicas, with vLLM's names after the prefix; nothing without a drafter."""
    if not parts:
        return
    total = SpecDecodeStats.sum(parts)
    names, values = list(labels), list(labels.values())
    for name, text, count in (
        ("drafts", "Drafts, of one or more tokens each.", total.num_drafts),
        ("draft_tokens", "Draft tokens verified.", sum(total.proposed)),
        ("accepted_tokens", "Draft tokens accepted.", sum(total.accepted)),
    ):
        family = CounterMetricFamily(f"{prefix}spec_decode_num_{name}", text, labels=names)
        family.add_metric(values, count)
        yield family
    if prefix == "octavo_":  # vLLM has no such name
        seconds = CounterMetricFamily(
            f"{prefix}spec_decode_draft_seconds", "Seconds that a draft model took.", labels=names
        )
        seconds.add_metric(values, total.draft_s)
        yield seconds
        # The number of drafts adapts, so that later positions are verified less often than there are drafts.
        yield _by_position(f"{prefix}spec_decode_num_draft_tokens_per_pos", "verified", total.proposed, labels)
    yield _by_position(f"{prefix}spec_decode_num_accepted_tokens_per_pos", "accepted", total.accepted, labels)


def _by_position(name: str, what: str, counts: Sequence[int], labels: Mapping[str, str]) -> Metric:
    family = CounterMetricFamily(name, f"Draft tokens {what}, by position in the draft.", labels=[*labels, "position"])
    for position, count in enumerate(counts):
        family.add_metric([*labels.values(), str(position)], count)
    return family
