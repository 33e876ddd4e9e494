"""Plots of what is in benchmarks/results, drawn when the site is built."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from benchmarks.peers.plot import OUR_COLOR, THEIR_COLOR, draw
from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
_WIDTH, _HEIGHT = 6.4, 2.6  # inches


def plots() -> dict[str, bytes]:
    """Return SVG files by name."""
    matplotlib.rcParams["svg.hashsalt"] = "octavo"  # the same bytes for the same figures
    return {f"{name}.svg": make() for name, make in _PLOTS.items()}


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _peers(name: str) -> Callable[[], bytes]:
    def make() -> bytes:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "peers.svg"
            draw(_read(name), path)
            return path.read_bytes()

    return make


def _bars(make: Callable[[Axes], None]) -> bytes:
    figure, axes = plt.subplots(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    make(axes)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    plt.close(figure)
    return svg.getvalue()


def _horizontal(axes: Axes, values: Mapping[str, float], text: str, label: str, colors: list[str]) -> None:
    bars = axes.barh(list(values), list(values.values()), color=colors)
    axes.bar_label(bars, [text.format(value) for value in values.values()], padding=3, fontsize=8)
    axes.set_xlabel(label, fontsize=8)
    axes.set_xlim(0, max(values.values()) * 1.2)


def _prefix_disk() -> bytes:
    found = _read("2026-11-27-prefix-disk")
    values = {
        "computed": found["computed_s"],
        "found on disk, after a restart": found["after_restart_s"],
        "found in memory": found["in_memory_s"],
    }

    def make(axes: Axes) -> None:
        _horizontal(
            axes, values, "{:.3g}", "seconds to the first token of 4,096, logarithmic", [THEIR_COLOR, *[OUR_COLOR] * 2]
        )
        axes.set_xscale("log")
        axes.set_xlim(0.01, 300)

    return _bars(make)


def _storm() -> bytes:
    runs = _read("2026-11-27-storm-1000")["runs"]
    labels = {f"{name}\n{run['num_equal']} of {run['num_requests']} equal": run for name, run in runs.items()}
    values = {label: run["pause_p50_s"] for label, run in labels.items()}

    def make(axes: Axes) -> None:
        text, label = "{:.2f}", "longest pause of a stream, seconds, median; processes killed every 5 to 15 s"
        _horizontal(axes, values, text, label, [OUR_COLOR] * len(values))

    return _bars(make)


def _speculation() -> bytes:
    tasks = _read("2026-11-24-avx2-speculation")["tasks"]
    values = {name: each["ngram"]["tokens_per_s"] / each["plain"]["tokens_per_s"] for name, each in tasks.items()}

    def make(axes: Axes) -> None:
        _horizontal(
            axes, values, "{:.2f}", "times as fast as without drafts, by prompt lookup", [OUR_COLOR] * len(values)
        )
        axes.axvline(1.0, linestyle="--", color="black", linewidth=0.8)

    return _bars(make)


_PLOTS: Mapping[str, Callable[[], bytes]] = {
    "avx512-peers": _peers("2026-11-22-avx512-peers"),
    "avx2-peers": _peers("2026-11-22-avx2-peers"),
    "gguf-peers": _peers("2026-11-24-gguf-peers"),
    "prefix-disk": _prefix_disk,
    "storm": _storm,
    "speculation": _speculation,
}
