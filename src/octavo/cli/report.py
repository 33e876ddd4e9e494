"""Reports: percentiles, a table for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence

Report = dict[str, float]

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], rank: float) -> float:
    """Return the `rank`-th percentile of `values`, linearly interpolated."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * rank / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(name: str, values: Sequence[float]) -> Report:
    """Return mean and percentiles of `values` under keys that start with `name`; empty if there are no values."""
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {f"{name}_mean": mean} | {f"{name}_p{rank}": percentile(values, rank) for rank in PERCENTILES}


def print_reports(reports: Sequence[Report], *, as_json: bool) -> None:
    """Print one line of JSON per report, or a table with one column per report."""
    if as_json:
        for report in reports:
            print(json.dumps(report))
        return
    names = dict.fromkeys(name for report in reports for name in report)
    print_table({name: [_figure(report.get(name)) for report in reports] for name in names})


def print_table(rows: Mapping[str, Sequence[str]]) -> None:
    """Print names on the left and values on the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    for _ in range(max(map(len, rows.values()), default=0)):
        table.add_column(justify="left", overflow="fold")
    for name, values in rows.items():
        table.add_row(name, *values)
    Console(highlight=False).print(table)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
