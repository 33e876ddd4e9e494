"""Which tiles are fastest on this device, and whether they have the same bits: attention, linears of dense weights.

    PYTHONPATH=src python -m benchmarks.gpu.tiles [--only decode prompt rows one_row] [--seconds 60] [--processes 12]

Each candidate is captured in a graph and timed there, with cold weights and KV, and shown beside the tile that Octavo
chooses ("*") and cuBLAS. Triton compiles for seconds, so processes compile all candidates first, into one cache.
`--dry-run` runs it interpreted on a CPU, with tiny sizes.

Legend: T = rows, R = requests, C = positions of a context, N = outputs, K = inputs.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PARTS = ("decode", "prompt", "rows", "one_row")


@dataclass(frozen=True)
class Candidate:
    """One tile: what it is called, and what makes the call to be timed, which returns its result."""

    name: str
    make: Callable[[], Callable[[], Any]]


@dataclass(frozen=True)
class Contest:
    """Candidates for one op at one size. The first is the one that Octavo chooses, if `has_chosen`."""

    name: str
    floor_us: float  # of bytes or products, at rates of an H200
    candidates: Sequence[Candidate]
    has_chosen: bool = True
    are_equal: bool = False  # all have the same bits, except "cublas"


def contests(parts: Sequence[str], *, is_dry: bool) -> Iterator[Contest]:
    from benchmarks.gpu import tile_cases as cases

    sizes = cases.DRY if is_dry else cases.FULL
    for part in parts:
        yield from cases.BY_PART[part](sizes)


def compile_part(options: argparse.Namespace) -> None:
    """Call every candidate whose turn it is once."""
    number, of = options.compile
    end_s, turn = time.monotonic() + options.seconds, 0
    for contest in contests(options.only, is_dry=options.dry_run):
        for candidate in contest.candidates:
            turn += 1
            if turn % of == number and time.monotonic() < end_s:
                try:
                    candidate.make()()
                except Exception as error:  # noqa: BLE001 - some tiles do not fit into a device's shared memory
                    print(f"{contest.name}, {candidate.name}: {type(error).__name__}: {str(error)[:100]}", flush=True)


def measure(options: argparse.Namespace) -> bool:
    """Time all candidates, a line for each contest; return whether bits are equal where they must be."""
    from benchmarks.gpu.clock import graph_seconds

    end_s, is_right = time.monotonic() + options.seconds, True
    for contest in contests(options.only, is_dry=options.dry_run):
        times, results = dict[str, float](), dict[str, Any]()
        for candidate in contest.candidates:
            if time.monotonic() > end_s:
                break
            try:
                run = candidate.make()
                results[candidate.name] = run()
                times[candidate.name] = graph_seconds(run) * 1e6
            except Exception as error:  # noqa: BLE001 - the next one may fit
                print(f"{contest.name}, {candidate.name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        is_right &= _show(contest, times, results)
    return is_right


def _show(contest: Contest, times: dict[str, float], results: dict[str, Any]) -> bool:
    ranked = sorted(times, key=times.__getitem__)
    best = "  ".join(f"{times[name]:.1f} {name}" for name in ranked[:5])
    chosen = contest.candidates[0].name
    now = f"{times[chosen]:.1f} {chosen}" if contest.has_chosen and chosen in times else "-"
    ours = [result for name, result in results.items() if name != "cublas"]
    is_equal = all((result == ours[0]).all() for result in ours[1:])
    verdict = "" if not contest.are_equal else (" same bits" if is_equal else " OTHER BITS")
    if contest.are_equal and "cublas" in results:
        verdict += ", cublas too" if (results["cublas"] == ours[0]).all() else ", not cublas"
    print(f"{contest.name}: floor {contest.floor_us:.1f} us, * {now} | {best}{verdict}", flush=True)
    return is_equal or not contest.are_equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--seconds", type=float, default=60.0, help="for compiling, and again for measuring")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, interpreted on a CPU")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)  # in a child: its number, of how many
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        from octavo.kernels.triton import interpreter

        interpreter.repair()
    if options.compile:
        compile_part(options)
        return 0
    if not options.dry_run:
        command = [sys.executable, "-m", "benchmarks.gpu.tiles", "--seconds", str(options.seconds)]
        command += ["--only", *options.only, "--compile"]
        children = [
            subprocess.Popen([*command, str(number), str(options.processes)]) for number in range(options.processes)
        ]
        for child in children:
            child.wait()
    return 0 if measure(options) else 1


if __name__ == "__main__":
    sys.exit(main())
