"""One page of metrics for a server with several models, whose series differ in `model_name`."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from octavo.metrics.prometheus import Exposition, MetricsPage


class SeveralExpositions(MetricsPage):
    """The metrics of all models, each family once; what is about the whole server is the same in all of them."""

    def __init__(self, parts: Sequence[Exposition]) -> None:
        self._parts = parts
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """Yield everything; called by the registry for each scrape."""
        families: dict[str, Metric] = {}
        for part in self._parts:
            for family in part.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    names = {(sample.name, *sorted(sample.labels.items())) for sample in known.samples}
                    known.samples += [
                        sample
                        for sample in family.samples
                        if (sample.name, *sorted(sample.labels.items())) not in names
                    ]
        yield from families.values()
