"""Everything about a GPU in one command: what it can do, whether kernels are right on it, how fast the engine is.

    PYTHONPATH=src python -m benchmarks.gpu.run [--json FILE] [--only decode ...] [--wheels FOLDER] [--dry-run]

It needs torch with CUDA, Triton, numpy, msgspec and safetensors (psutil, too, for a dry run), and no network,
checkpoint, tokenizer or compiler; wheels of what is missing may lie in a folder. Each section runs in a process of its
own, so that one which fails, hangs or breaks the device takes only itself along, and keeps what it had found. Under
eight minutes in all.
`--dry-run` runs tiny sizes on a CPU: figures mean nothing then, but everything has run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.report import Finding, Report, read_findings

NAMES = (
    "machine", "kernels", "equality", "decode", "profile", "prefill", "workload", "deterministic", "start", "low_bit",
)  # fmt: skip
TOTAL_S = 470.0
_ROOT = Path(__file__).parent.parent.parent


def run_section(name: str, path: Path, *, is_dry: bool) -> None:
    """Run one section in this process; it appends to `path`, and reads there what the machine can do."""
    from benchmarks.gpu.limits import Limits
    from benchmarks.gpu.plan import DRY, FULL
    from benchmarks.gpu.sections import SECTIONS

    SECTIONS[name](DRY if is_dry else FULL, Report(name, path), Limits.of(read_findings(path)))


def run_apart(name: str, path: Path, budget_s: float, *, is_dry: bool) -> None:
    """Run one section in a process of its own, for so long at most, and note how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--section", name, "--into", str(path)]
    start_s = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, *(["--dry-run"] if is_dry else [])],
            capture_output=True,
            text=True,
            timeout=budget_s,
            cwd=_ROOT,
            check=False,
        )
        failure = f"exit {done.returncode}: {_last_lines(done.stderr)}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"cut off after {budget_s:.0f} s"
    record_end(name, path, time.perf_counter() - start_s, failure)


def run_here(name: str, path: Path, *, is_dry: bool) -> None:
    """Run one section in this process, whatever it raises."""
    start_s, failure = time.perf_counter(), ""
    try:
        run_section(name, path, is_dry=is_dry)
    except Exception:  # noqa: BLE001 - the other sections go on
        failure = _last_lines(traceback.format_exc())
    record_end(name, path, time.perf_counter() - start_s, failure)


def record_end(name: str, path: Path, took_s: float, failure: str) -> None:
    """Write the line that every section ends with."""
    Report(name, path).add("section", "failed" if failure else "done", note=f"{took_s:.1f} s {failure}".strip())


def _last_lines(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-3:])[-600:]


def use_wheels(folder: Path, into: Path) -> None:
    """Unpack the wheels in `folder` and let this process and its children import from them."""
    for wheel in sorted(folder.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(into)
    sys.path.append(str(into))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(into)]))


def show(findings: list[Finding]) -> None:
    """Print the lines of one section."""
    if findings:
        print(f"\n== {findings[0].section}")
    for finding in findings:
        print(finding.line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all findings to this file")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these sections alone")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this Python lacks")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--in-process", action="store_true", help="sections in this process, one after the other")
    parser.add_argument("--section", choices=NAMES, help=argparse.SUPPRESS)  # in a child
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        run_section(options.section, options.into, is_dry=options.dry_run)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.wheels:
            use_wheels(options.wheels, Path(folder) / "wheels")
        os.environ.setdefault("OCTAVO_CACHE", str(Path(folder) / "cache"))  # what other runs left is not this one's
        path, end_s = Path(folder) / "findings.jsonl", time.perf_counter() + TOTAL_S
        for name in options.only:
            num_known = len(read_findings(path))
            if options.in_process:
                run_here(name, path, is_dry=options.dry_run)
            else:
                left_s = end_s - time.perf_counter()
                run_apart(name, path, min(budget_of(name), max(left_s, 1.0)), is_dry=options.dry_run)
            show(read_findings(path)[num_known:])
        findings = read_findings(path)
    if options.json:
        options.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    is_good = all(finding.is_right is not False and finding.value != "failed" for finding in findings)
    return 0 if is_good else 1


def budget_of(name: str) -> float:
    """Return how long a section may take."""
    return {
        "kernels": 110.0,
        "decode": 110.0,
        "profile": 60.0,
        "workload": 60.0,
        "equality": 60.0,
        "deterministic": 60.0,
        "low_bit": 90.0,
    }.get(name, 45.0)


if __name__ == "__main__":
    sys.exit(main())
