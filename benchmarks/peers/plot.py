"""A report of `compare` as a picture: a panel per precision and cell, a bar per engine, the roofline dashed."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.peers.tables import OURS, TITLES

OUR_COLOR, THEIR_COLOR = "#2b6cb0", "#a0aec0"
PANEL_WIDTH, BAR_HEIGHT = 3.4, 0.32


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the picture as SVG, the same bytes for the same report."""
    rows_of = {group: [row for row in found["rows"] if row["group"] == group and row["medians"]] for group in TITLES}
    rows_of = {group: rows for group, rows in rows_of.items() if rows}
    cells = found["cells"]
    heights = [BAR_HEIGHT * len(rows) + 0.7 for rows in rows_of.values()]
    matplotlib.rcParams["svg.hashsalt"] = "octavo"
    figure, grid = plt.subplots(
        len(rows_of),
        len(cells),
        figsize=(PANEL_WIDTH * len(cells), sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for line, (group, rows) in zip(grid, rows_of.items(), strict=True):
        for axes, cell in zip(line, cells, strict=True):
            draw_panel(axes, rows, cell)
            axes.set_title(f"{cell}, {TITLES[group]}", fontsize=9)
        for axes in line[1:]:
            axes.set_yticklabels([])
    figure.supxlabel("tokens per second; dashed: what memory and units of the machine allow", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_panel(axes: Axes, rows: list[dict[str, Any]], cell: str) -> None:
    """One bar per engine, the first on top."""
    names = [f"{row['engine']} {row['precision']}" for row in rows]
    rates = [row["medians"].get(cell, 0.0) for row in rows]  # 0: it failed
    colors = [OUR_COLOR if row["engine"] == OURS else THEIR_COLOR for row in rows]
    bars = axes.barh(names, rates, color=colors)
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=2, fontsize=7)
    limit = max(row["limits"][cell] for row in rows)
    axes.axvline(limit, linestyle="--", color="black", linewidth=0.8)
    axes.set_xlim(0, limit * 1.1)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
