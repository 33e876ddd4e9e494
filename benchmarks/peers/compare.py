"""Octavo and every peer that is installed, in turns, in one run: JSON, a table and a plot.

    python -m benchmarks.peers.compare [--engines octavo llama.cpp] [--groups bf16 int8 int4] [--repeats 3] [--out NAME]

Each engine runs in a process of its own, one after the other, and they take turns `--repeats` times, so that a noisy
neighbor hits all; tables show medians. `--out NAME` writes NAME.json and NAME.md, and NAME.svg where matplotlib is.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.geometry import GEOMETRIES
from benchmarks.machine.probe import Machine, best_of, probe, speedup
from benchmarks.peers import checkpoint
from benchmarks.peers.cells import FIRST, Capacity, Cell
from benchmarks.peers.environment import export, run_module
from benchmarks.peers.registry import ENGINES, GROUPS, ROOT, Peer, PeerMissingError, peers_home
from benchmarks.peers.roofline import limit, memory_bytes
from benchmarks.peers.tables import last_line, tables

SHORT = ["decode:1:128", "decode:8:128", "decode:32:128", "prefill:1024"]
HAS_PLOTS = find_spec("matplotlib") is not None
DEFAULT = [*SHORT, "decode:1:2048", "decode:1:8192"]
ALL = [*DEFAULT, "decode:1:960", "decode:8:960", "decode:32:960"]


@dataclass(kw_only=True)
class Row:
    """One engine at one precision."""

    peer: Peer
    group: str
    precision: str
    runs: list[dict[str, float]] = field(default_factory=list)
    failure: str | None = None
    failed_cells: dict[str, str] = field(default_factory=dict)  # why, by cell; they are not tried again

    @property
    def name(self) -> str:
        return f"{self.peer.name} {self.precision}"

    def outcome(self) -> str:
        """Say what came of the last turn."""
        return self.failure or ", ".join(f"{name} {value:.4g}" for name, value in self.runs[-1].items())

    def medians(self) -> dict[str, float]:
        keys = dict.fromkeys(key for run in self.runs for key in run if key not in self.failed_cells)
        return {key: statistics.median(run[key] for run in self.runs if key in run) for key in keys}

    @property
    def kv_bytes(self) -> int:
        return 1 if self.precision.endswith("+kv8") else 2

    def limits(self, geometry: dict[str, Any], cells: list[str], machine: Machine) -> dict[str, float]:
        return {text: limit(geometry, Cell.parse(text), self.group, self.kv_bytes, machine) for text in cells}


def run_once(row: Row, model: Path, cells: list[str], timeout_s: float) -> dict[str, float]:
    """Measure one row once. Each long context has a process of its own: start and memory are those of short ones, and
    the others count where one fails.

    Raises:
        PeerMissingError: when the peer is not installed.
        RuntimeError: with the end of its output, when it fails.
    """
    results = run_process(row, model, [text for text in cells if text in SHORT], timeout_s)
    for text in cells:
        if text in SHORT or text in row.failed_cells:
            continue
        try:
            results[text] = run_process(row, model, [text], timeout_s)[text]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row.failed_cells[text] = str(error)
    return results


def run_process(row: Row, model: Path, cells: list[str], timeout_s: float) -> dict[str, float]:
    arguments = ["--begun", str(time.time()), "--cells", *cells]
    output = run_module(row.peer, row.precision, row.peer.module, model, arguments, timeout_s)
    results: dict[str, float] = json.loads(output.splitlines()[-1])
    return results


def attempt(row: Row, action: Callable[[], object]) -> None:
    """A row that fails says so in the report and is not tried again."""
    try:
        action()
    except (PeerMissingError, RuntimeError, subprocess.TimeoutExpired) as error:
        row.failure = str(error)


def take_turns(rows: list[Row], model: Path, cells: list[str], repeats: int, timeout_s: float) -> None:
    """Fill the rows; a figure is told as soon as it is known."""
    for turn in range(repeats):
        for row in rows:
            if row.failure is None:
                attempt(row, partial(run_again, row, model, cells, timeout_s))
                print(f"turn {turn + 1}: {row.name}: {row.outcome()}", file=sys.stderr, flush=True)


def run_again(row: Row, model: Path, cells: list[str], timeout_s: float) -> None:
    row.runs.append(run_once(row, model, cells, timeout_s))


def chosen_rows(engines: list[str], groups: list[str], precisions: list[str] | None) -> list[Row]:
    return [
        Row(peer=ENGINES[name], group=group, precision=precision)
        for group in groups
        for name in engines
        for precision in ENGINES[name].precisions.get(group, ())
        if precisions is None or precision in precisions
    ]


def report(
    geometry: str, rows: list[Row], cells: list[str], before: dict[int, Machine], after: dict[int, Machine]
) -> dict[str, Any]:
    """Return all that was found; `before` and `after` are what the machine could do around the run."""
    machine = best_of(before, after)
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    capacity = Capacity.of([FIRST, *(Cell.parse(text) for text in cells if text in SHORT)])
    return {
        "geometry": geometry,
        "command": " ".join(["python -m benchmarks.peers.compare", *sys.argv[1:]]),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cpu": platform.processor() or platform.machine(),
        "machine": {str(count): asdict(limits) for count, limits in machine.items()},
        "speedup": min(speedup(before), speedup(after)),
        "cells": cells,
        "rows": [
            {
                "engine": row.peer.name,
                "precision": row.precision,
                "group": row.group,
                "failure": row.failure,
                "failed_cells": row.failed_cells,
                "medians": row.medians(),
                "limits": row.limits(GEOMETRIES[geometry], cells, machine[max(machine)]),
                "memory_bytes": memory_bytes(GEOMETRIES[geometry], row.group, row.kv_bytes, capacity),
                "runs": row.runs,
            }
            for row in rows
        ],
    }


def write(found: dict[str, Any], name: Path) -> None:
    """Write the report and its tables beside each other, and its picture where matplotlib is."""
    name.with_name(f"{name.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    name.with_name(f"{name.name}.md").write_text(tables(found) + "\n")
    if HAS_PLOTS:
        from benchmarks.peers.plot import draw

        draw(found, name.with_name(f"{name.name}.svg"))


def check_out(name: Path) -> None:
    """Say what the report will lack, before the hours that it takes.

    Raises:
        NotADirectoryError: there is no folder for it.
    """
    if not name.absolute().parent.is_dir():
        raise NotADirectoryError(f"--out {name}: {name.absolute().parent} is no folder")
    if not HAS_PLOTS:
        print(f"{name}.svg will not be written: it takes matplotlib, pip install 'octavo[benchmark]'", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b", help="others: Octavo, llama.cpp")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=[*GROUPS, "gguf"],
        default=list(GROUPS),
        help="gguf: the other types of such files",
    )
    parser.add_argument("--precisions", nargs="+", help="only these, by their names in the registry")
    parser.add_argument("--cells", nargs="+", default=DEFAULT, help="or `all`: contexts of about 1,000 tokens too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one process of an engine")
    parser.add_argument("--out", type=Path, help="name of the files to write, without its ending")
    options = parser.parse_args()
    if options.out:
        try:
            check_out(options.out)
        except NotADirectoryError as error:
            parser.error(str(error))
    cells = ALL if options.cells == ["all"] else options.cells
    model = checkpoint.make(peers_home() / "models" / options.geometry, GEOMETRIES[options.geometry])
    before = probe()
    rows = chosen_rows(options.engines, options.groups, options.precisions)
    for row in rows:
        attempt(row, partial(export, row.peer, row.precision, model, options.timeout))
        if row.failure is not None:
            print(f"left out: {row.name}: {last_line(row.failure)}", file=sys.stderr, flush=True)
    take_turns(rows, model, cells, options.repeats, options.timeout)
    found = report(options.geometry, rows, cells, before, probe())
    print(tables(found))
    if options.out:
        write(found, options.out)


if __name__ == "__main__":
    main()
