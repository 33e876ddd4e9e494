"""The command that every peer is, run in its own environment: `python -m benchmarks.peers.NAME MODEL --cells ...`.

Prints progress on stderr and the figures as one line of JSON, the last of its output.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.cells import FIRST, Capacity, Cell, Engine, emit, measure, peak_bytes, time_start

OpenEngine = Callable[[Path, str, Capacity, int], Engine]


def run(description: str, precisions: list[str], open_engine: OpenEngine) -> None:
    """Parse the command line, open the engine, measure its cells.

    `open_engine` gets the model's folder, the precision, the room that is needed, and the number of threads.
    """
    options = parser(description, precisions).parse_args()
    cells = {text: Cell.parse(text) for text in options.cells}
    capacity = Capacity.of([FIRST, *cells.values()])
    engine = open_engine(options.model, options.precision, capacity, options.threads)
    results = {"start_s": time_start(engine, options.begun)}
    for text, cell in cells.items():
        results[text] = measure(engine, cell)
        print(f"{text} {results[text]:.1f} tokens/s", file=sys.stderr, flush=True)
    emit(results | {"peak_bytes": peak_bytes()})


def parser(description: str, precisions: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that benchmarks.peers.checkpoint wrote")
    parser.add_argument("--precision", choices=precisions, default=precisions[0])
    parser.add_argument("--cells", nargs="*", default=["decode:1:128"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--begun", type=float, default=time.time(), help="time.time() when the command was given")
    return parser
