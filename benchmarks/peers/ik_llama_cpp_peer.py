"""ik_llama.cpp, a fork of llama.cpp, through its own `llama-batched-bench`, which IK_LLAMA_CPP names.

    IK_LLAMA_CPP=ik_llama.cpp/build/bin/llama-batched-bench \\
        python -m benchmarks.peers.ik_llama_cpp_peer MODEL --precision q8_0 --cells decode:8:128 prefill:1024

Its best settings here: flash attention, a micro-batch of 512, tensors repacked at load (`-rtr`). Requests of a decode
cell share the prompt's keys and values, in one memory for all. Its rate counts the first tokens too, which
`cells.measure` leaves out: one in twenty.
"""

import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.cells import FIRST, Cell, emit
from benchmarks.peers.registry import GGUF_FORMS, IK_LLAMA_CPP
from benchmarks.peers.runner import parser

LONG_PROMPT = 2048
# Columns: tokens of a prompt, of an answer, requests, all tokens; seconds and tokens per second of prompts, of answers.
_ROW = re.compile(r"^\|" + r" *\d+ \|" * 4 + r" *[\d.]+ \| *([\d.]+) \| *[\d.]+ \| *([\d.]+) \|")


def arguments(file: Path, cell: Cell, repeats: int, threads: int) -> list[str]:
    """Return the program's arguments for a cell, computed `repeats` times."""
    num_tokens = cell.num_in + cell.num_requests * cell.num_out
    context = -(-num_tokens // 256) * 256
    shape = f"-npp {cell.num_in} -ntg {cell.num_out} -npl {','.join([str(cell.num_requests)] * repeats)} -pps"
    settings = f"-c {context} -b 2048 -ub 512 -t {threads} -tb {threads} -fa on -rtr"
    return ["-m", str(file.resolve()), *shape.split(), *settings.split()]


def rates(output: Iterator[str], kind: str) -> Iterator[float]:
    """Yield the tokens per second of each row of the program's table, as it comes."""
    for line in output:
        if row := _ROW.match(line):
            yield float(row[1 if kind == "prefill" else 2])


def run_cell(file: Path, cell: Cell, threads: int, repeats: int = 2) -> tuple[float, float]:
    """Return the rate of the last of `repeats`, and when (time.time) the first one's row was there.

    Raises:
        RuntimeError: when the program fails.
    """
    program = str(IK_LLAMA_CPP.program())
    with (
        tempfile.TemporaryDirectory() as folder,  # it leaves a log where it runs
        subprocess.Popen(
            [program, *arguments(file, cell, repeats, threads)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        found = [(rate, time.time()) for rate in rates(iter(process.stderr), cell.kind)]
    if process.returncode != 0 or len(found) != repeats:
        raise RuntimeError(f"{program}: exit {process.returncode}, {len(found)} of {repeats} rows")
    return found[-1][0], found[0][1]


def main() -> None:
    options = parser(__doc__ or "", list(GGUF_FORMS)).parse_args()
    file = options.model / f"{options.precision}.gguf"
    _, first_s = run_cell(file, FIRST, options.threads, repeats=1)
    results = {"start_s": first_s - options.begun}
    for text in options.cells:
        cell = Cell.parse(text)
        # A decode behind a long prompt is warm after that: it is not computed twice.
        results[text], _ = run_cell(file, cell, options.threads, repeats=1 if cell.num_in >= LONG_PROMPT else 2)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    emit(results | {"peak_bytes": peak})


if __name__ == "__main__":
    main()
