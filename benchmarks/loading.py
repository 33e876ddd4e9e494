"""Load speed: how long weights take from a warm page cache to a model that is ready, beside just reading the files.

    python -m benchmarks.loading MODEL [MODEL ...] [--quantization int8] [--repeats 3] [--json FILE]

Each load is a process of its own. "first" packs the checkpoint, "again" maps the weights that the first start packed.
The fraction is that of the bandwidth at which all cores read the same files from the page cache. Peak memory is what
the process has besides what it had before loading, mapped files included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from octavo.config.hub import resolve_model

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.tensors")
_READ_BYTES = 4 << 20
_PACKED_GIB = 20.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """One line of the table; times are medians."""

    model: str
    start: str  # first or again
    file_gb: float
    read_gb_per_s: float  # from the page cache, on all cores
    load_s: float
    fraction: float  # of that bandwidth
    peak_gb: float


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model that have weights."""
    return [path] if path.is_file() else sorted(file for pattern in _PATTERNS for file in path.glob(pattern))


def read_all(files: list[Path]) -> float:
    """Read files on all cores; return the seconds."""

    def read(file: Path, start: int, stop: int) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        with file.open("rb", buffering=0) as opened:
            opened.seek(start)
            while start < stop:
                start += opened.readinto(buffer[: stop - start])

    num_cores = len(os.sched_getaffinity(0))
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(num_cores) as pool:
        jobs = [
            pool.submit(read, file, size * core // num_cores, size * (core + 1) // num_cores)
            for file in files
            for size in [file.stat().st_size]
            for core in range(num_cores)
        ]
        for job in jobs:
            job.result()
    return time.perf_counter() - begun_s


def load_here(model: str, quantization: str | None, dtype: str) -> dict[str, float]:
    """Load a model in this process; return seconds and the growth of peak memory in bytes."""
    from octavo.config.args import EngineArgs
    from octavo.config.parallel import ALONE, Rendezvous
    from octavo.worker.worker import Worker

    options: dict[str, Any] = {"quantization": quantization, "dtype": dtype, "packed_cache_gib": _PACKED_GIB}
    worker = Worker(EngineArgs(model_name=model, **options).resolve(), ALONE, Rendezvous())
    before = _peak_bytes()
    begun_s = time.perf_counter()
    worker.load_model()
    return {"load_s": time.perf_counter() - begun_s, "peak_bytes": float(_peak_bytes() - before)}


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(model: str, args: argparse.Namespace) -> list[Load]:
    """Measure first and later starts of a model."""
    files = weight_files(resolve_model(model))
    num_bytes = sum(file.stat().st_size for file in files)
    read_all(files)  # into the page cache
    rate = num_bytes / median(read_all(files) for _ in range(args.repeats))
    loads: dict[str, list[dict[str, float]]] = {"first": [], "again": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for start in loads.values():
                start.append(_in_process(model, args, cache))
    return [
        Load(
            model=model,
            start=start,
            file_gb=num_bytes / 1e9,
            read_gb_per_s=rate / 1e9,
            load_s=(took_s := median(each["load_s"] for each in found)),
            fraction=num_bytes / took_s / rate,
            peak_gb=median(each["peak_bytes"] for each in found) / 1e9,
        )
        for start, found in loads.items()
    ]


def _in_process(model: str, args: argparse.Namespace, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loading", model, "--here", "--dtype", args.dtype]
    command += ["--quantization", args.quantization] if args.quantization else []
    environment = {**os.environ, "OCTAVO_CACHE": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(load_here(args.models[0], args.quantization, args.dtype)))
        return
    print(f"{'model':40} start  file GB  read GB/s  load s  fraction  peak GB")
    found = []
    for model in args.models:
        for load in measure(model, args):
            found.append(asdict(load))
            rates = f"{load.file_gb:8.2f} {load.read_gb_per_s:10.2f} {load.load_s:7.2f} {load.fraction:9.2f}"
            print(f"{load.model[-40:]:40} {load.start:5} {rates} {load.peak_gb:8.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
