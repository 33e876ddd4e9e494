"""Plots a run: one SVG with an empirical distribution function per kind of latency."""

from collections.abc import Mapping, Sequence
from html import escape

from octavo.cli.report import percentile

WIDTH, HEIGHT, MARGIN = 300, 200, 44  # of one panel's axes, and the margin around them, in pixels
MAX_POINTS = 200  # per curve: more would be invisible
MARKS = (50, 90, 99)


def draw_cdfs(title: str, samples: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG with one panel per name: the empirical distribution of its values, with percentiles marked."""
    panels = [
        f'<g transform="translate({MARGIN + number * (WIDTH + 2 * MARGIN)} {2 * MARGIN})">{_panel(name, values)}</g>'
        for number, (name, values) in enumerate(samples.items())
        if values
    ]
    width = max(len(panels), 1) * (WIDTH + 2 * MARGIN)
    height = HEIGHT + 4 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="{MARGIN}" y="{MARGIN / 2}" font-size="14">{escape(title)}</text>{"".join(panels)}</svg>\n'
    )


def _panel(name: str, values: Sequence[float]) -> str:
    """Return one panel. Its x axis ends 10% above the 99th percentile, so that outliers do not hide everything else."""
    end = percentile(values, 99) * 1.1 or 1.0
    ranks = [100 * i / (MAX_POINTS - 1) for i in range(MAX_POINTS)]
    points = [(min(percentile(values, rank) / end, 1.0) * WIDTH, (1 - rank / 100) * HEIGHT) for rank in ranks]
    curve = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<text x="0" y="-12">{escape(name)}, n={len(values)}, max {max(values):.4g}</text>'
        f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="black"/>'
        f'<text x="-8" y="10" text-anchor="end">100%</text><text x="-8" y="{HEIGHT}" text-anchor="end">0%</text>'
        f'<text x="0" y="{HEIGHT + 16}">0</text><text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">{end:.4g}</text>'
        f'<polyline points="{curve}" fill="none" stroke="#1f5fbf" stroke-width="1.5"/>'
        + "".join(_mark(rank, percentile(values, rank), end) for rank in MARKS)
    )


def _mark(rank: int, value: float, end: float) -> str:
    x, y = min(value / end, 1.0) * WIDTH, (1 - rank / 100) * HEIGHT
    return (
        f'<path d="M0 {y:.1f}H{x:.1f}" stroke="#999" stroke-dasharray="2 3"/>'
        f'<text x="{x + 4:.1f}" y="{y + 12:.1f}" font-size="10">p{rank} {value:.4g}</text>'
    )
