"""A report of `compare` as Markdown: for each group of precisions, every engine in every cell."""

import json
from pathlib import Path
from typing import Any

# What a form costs in quality, measured by `benchmarks.quality` on a real model: "forms", by engine and precision.
QUALITY = Path(__file__).parents[1] / "results" / "2026-11-23-quality-smollm2.json"
OURS = "octavo"
TITLES = {"bf16": "bf16", "int8": "8 bits", "int4": "4 bits", "gguf": "Other types of GGUF files"}

QUIET = 0.85  # of the ideal speed-up; below, somebody else was computing


def tables(found: dict[str, Any]) -> str:
    """Return the limits of the machine and a table per group."""
    parts = [machine_line(found["machine"])]
    if found["speedup"] < QUIET * max(map(int, found["machine"]), default=1):
        parts.append(
            f"**Not a quiet run**: all threads together computed only {found['speedup']:.1f} times as fast as one."
        )
    for group, title in TITLES.items():
        rows = [row for row in found["rows"] if row["group"] == group]
        if rows:
            parts.append(f"### {title}\n\n{group_table(rows, found['cells'])}")
    failures = [
        f"- {row['engine']} {row['precision']}{what}: {last_line(why)}"
        for row in found["rows"]
        for what, why in {"": row["failure"], **{f", {cell}": why for cell, why in row["failed_cells"].items()}}.items()
        if why
    ]
    return "\n\n".join([*parts, *(["Not measured:\n\n" + "\n".join(failures)] if failures else [])])


def machine_line(machine: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{threads} thread{'s' if threads != '1' else ''}: {limits['bytes_per_s'] / 1e9:.1f} GB/s, "
        f"{limits['bf16_per_s'] / 1e12:.2f} bf16 and {limits['int8_per_s'] / 1e12:.2f} int8 T/s"
        for threads, limits in machine.items()
    )


def group_table(rows: list[dict[str, Any]], cells: list[str]) -> str:
    """Tokens/s (of the roofline), peak (of weights, KV and 500 MB), the form's divergence from float32 on a real model;
    last, Octavo's best over the best peer."""
    heads = ["engine", *cells, "start, s", "peak, MB", "KL, nats"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " --- |" * (len(heads) - 1)]
    forms = json.loads(QUALITY.read_text())["forms"]
    measured = [row for row in rows if row["medians"]]
    for row in measured:
        medians = row["medians"]
        figures = [
            f"{medians[cell]:,.1f} ({medians[cell] / row['limits'][cell]:.0%})" if cell in medians else "-"
            for cell in cells
        ]
        peak = medians["peak_bytes"]
        name = f"{row['engine']} {row['precision']}"
        divergence = f"{forms[name]['kl']:.2g}" if name in forms else "not measured"
        rest = [f"{medians['start_s']:.2f}", f"{peak / 1e6:,.0f} ({peak / row['memory_bytes']:.0%})", divergence]
        lines.append(f"| {name} | " + " | ".join(figures + rest) + " |")
    ratios = [ratio(measured, cell) for cell in cells]
    lines.append("| Octavo over the best peer | " + " | ".join(ratios) + " | | | |")
    return "\n".join(lines)


def ratio(rows: list[dict[str, Any]], cell: str) -> str:
    ours = [row["medians"][cell] for row in rows if row["engine"] == OURS and cell in row["medians"]]
    theirs = [row["medians"][cell] for row in rows if row["engine"] != OURS and cell in row["medians"]]
    return f"{max(ours) / max(theirs):.2f}" if ours and theirs else "-"


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip()][-1]
