"""What this machine can do at most: reading cold memory, multiplying from registers, with one thread and with all.

    python -m benchmarks.machine.probe [--threads 2]

Compiles `probe.cpp` for this machine (needs g++ or what CXX names) and runs it.
"""

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("probe.cpp")
FLAGS = ["-O3", "-march=native", "-std=c++17", "-pthread"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Limits with a number of threads: bytes read per second, operations per second (a product and a sum are two)."""

    bytes_per_s: float
    float32_per_s: float
    bf16_per_s: float
    int8_per_s: float


def probe(threads: int = 2) -> dict[int, Machine]:
    """Return the limits with one thread and with `threads`; takes about five seconds.

    Raises:
        subprocess.CalledProcessError: when there is no compiler, or the program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "probe"
        subprocess.run([os.environ.get("CXX", "g++"), *FLAGS, str(SOURCE), "-o", str(program)], check=True)
        done = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True)
    return {int(count): Machine(**limits) for count, limits in json.loads(done.stdout).items()}


def best_of(before: dict[int, Machine], after: dict[int, Machine]) -> dict[int, Machine]:
    """Return the better of two measurements, limit by limit."""
    return {
        count: Machine(**{name: max(value, getattr(after[count], name)) for name, value in asdict(limits).items()})
        for count, limits in before.items()
    }


def speedup(machine: dict[int, Machine]) -> float:
    """Return how many threads' worth of products all threads made: less than there are means that others computed."""
    return machine[max(machine)].bf16_per_s / machine[min(machine)].bf16_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    print("| threads | GB/s | float32 T/s | bf16 T/s | int8 T/s |\n| --- | --- | --- | --- | --- |")
    for count, limits in probe(parser.parse_args().threads).items():
        rates = [limits.float32_per_s, limits.bf16_per_s, limits.int8_per_s]
        print(
            f"| {count} | {limits.bytes_per_s / 1e9:.1f} | " + " | ".join(f"{rate / 1e12:.2f}" for rate in rates) + " |"
        )


if __name__ == "__main__":
    main()
