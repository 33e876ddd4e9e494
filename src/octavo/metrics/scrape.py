"""Reads what a server says at `/metrics`: two scrapes give rates, and quantiles of what happened between them."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape, by name and labels, and when it was made."""

    time_s: float
    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def of(cls, text: str, time_s: float) -> "Scrape":
        """Parse Prometheus text. Raises ValueError: it is none."""
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(time_s, samples)

    def has(self, name: str) -> bool:
        return any(known == name for known, _ in self.samples)

    def total(self, name: str) -> float:
        """Return the sum over all labels; 0 if there is no such metric."""
        return sum(value for (known, _), value in self.samples.items() if known == name)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the values by one label, summed over the others."""
        found: dict[str, float] = {}
        for (known, labels), value in self.samples.items():
            if known == name and (key := dict(labels).get(label)) is not None:
                found[key] = found.get(key, 0.0) + value
        return found

    def label(self, label: str) -> str | None:
        """Return the value of a label, of any sample that has it."""
        return next((dict(labels)[label] for _, labels in self.samples if label in dict(labels)), None)


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two scrapes of one server. One that was started anew begins with zeros."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return self.after.time_s - self.before.time_s

    def grown(self, name: str) -> float:
        """Return by how much a counter has grown."""
        before, after = self.before.total(name), self.after.total(name)
        return after - before if after >= before else after

    def rate(self, name: str) -> float:
        """Return how much a counter grows in a second."""
        return self.grown(name) / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of a histogram's new values, within a bucket by interpolation; None: there are none.

        Those above the last bound count as the last bound, as in Prometheus.
        """
        before, after = self.before.by(f"{name}_bucket", "le"), self.after.by(f"{name}_bucket", "le")
        counts = sorted((float(bound), count - before.get(bound, 0.0)) for bound, count in after.items())
        if not counts or counts[-1][1] <= 0:
            return None
        wanted, lower, below = share * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (wanted - below) / (count - below) if count > below else bound
            lower, below = bound, count
        return lower
