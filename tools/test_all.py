"""Run the tests in full breadth: all of them, or the parts whose sources have changed.

    python -m tools.test_all                        everything (`make test-all` runs this)
    python -m tools.test_all kernels schedules      these parts
    python -m tools.test_all --changed              parts touched since the last release tag, or by the last 50 commits
    python -m tools.test_all --changed --list       say which those are, and run nothing

Full breadth is OCTAVO_TESTS=all: see `tests/breadth.py`. `make test` runs the same tests in less breadth.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUM_COMMITS = 50
NUM_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tests that look at the same sources. Paths are prefixes; those of sources begin below src/octavo."""

    tests: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # in place of tests, where pytest does not run it
    sources: tuple[str, ...]


# The one place that says which sources ask for which tests. A part is also asked for when its own tests change.
PARTS = {
    "kernels": Part(  # every ISA level
        tests=("tests/kernels/test_", "tests/attention/", "tests/layers/", "tests/sampling/"),
        sources=("kernels/", "attention/", "layers/", "sampling/"),
    ),
    "triton": Part(  # the interpreter's breadth, and every kernel compiled for GPUs that are not here
        tests=("tests/kernels/triton/", "tests/end_to_end/test_triton.py", "tests/benchmarks/", "tests/device/"),
        sources=(
            "kernels/triton/",
            "attention/triton",
            "kernels/quantiz",
            "kernels/rotation",
            "device/",
            "testing_device.py",
        ),
    ),
    "models": Part(
        tests=(
            *("tests/models/", "tests/loader/", "tests/config/", "tests/demo/", "tests/gguf/"),
            *("tests/convert/", "tests/calibration/"),
        ),
        sources=("models/", "layers/", "loader/", "config/", "demo/", "gguf/", "convert/", "calibration/"),
    ),
    "engines": Part(  # equality of every path, storms, ranks in processes
        tests=("tests/end_to_end/", "tests/worker/", "tests/executor/", "tests/distributed/"),
        sources=("worker/", "executor/", "distributed/", "scheduler/", "sampling/", "speculative/", "lora/", "llm.py"),
    ),
    "schedules": Part(  # thousands of random schedules
        tests=("tests/scheduler/", "tests/contracts/"),
        sources=("scheduler/", "contracts/", "testing/"),
    ),
    "text": Part(  # random grammars, texts and cuts
        tests=("tests/structured/", "tests/tokenizer/", "tests/engine/", "tests/metrics/", "tests/test_"),
        sources=("structured", "tokenizer/", "engine/", "metrics/", "inputs.py", "outputs.py", "sampling_params.py"),
    ),
    "servers": Part(  # hostile clients, crowds
        tests=("tests/server/", "tests/hostile/", "tests/cli/"),
        sources=("server/", "cli/", "engine/", "async_llm.py"),
    ),
    "sanitizers": Part(command=("make", "sanitize"), sources=("kernels/cpu/",)),
}
# A change to one of these asks for every part.
EVERYTHING = ("tests/conftest.py", "tests/breadth.py", "pyproject.toml", "constraints.txt", "CMakeLists.txt")


def changed_files() -> list[str] | None:
    """Return the files that differ from the last release, or from 50 commits ago; None where history is too short."""
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*")
    base = tag or _git("rev-parse", "--verify", "--quiet", f"HEAD~{NUM_COMMITS}")
    return None if base is None else (_git("diff", "--name-only", base) or "").splitlines()


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def parts_for(files: list[str]) -> list[str]:
    """Return the parts that a change of these files asks for."""
    if any(file.startswith(EVERYTHING) for file in files):
        return list(PARTS)
    return [
        name
        for name, part in PARTS.items()
        if any(file.startswith((*part.tests, *(f"src/octavo/{source}" for source in part.sources))) for file in files)
    ]


def files_of(part: Part) -> list[str]:
    """Return the files of a part's tests."""
    found = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [path for path in found if part.tests and path.startswith(part.tests)]


def run(names: list[str]) -> int:
    """Run parts: those of pytest in one go, then the others. Return the first exit status that is not 0."""
    files = sorted({file for name in names for file in files_of(PARTS[name])})
    commands = [[*PARTS[name].command] for name in names if PARTS[name].command]
    if files:
        pytest = [sys.executable, "-m", "pytest", "-n", str(NUM_WORKERS), "--dist", "loadfile"]
        commands.insert(0, [*pytest, *files])
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OCTAVO_TESTS": "all"}, check=False)
        if done.returncode:
            return done.returncode
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests in full breadth.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--changed", action="store_true", help="only parts whose sources have changed")
    parser.add_argument("--list", action="store_true", help="name the parts, and run nothing")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.parts} - {*PARTS})
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    names: list[str] = arguments.parts or list(PARTS)
    if arguments.changed and (files := changed_files()) is not None:
        asked_for = parts_for(files)
        names = [name for name in names if name in asked_for]
    print("parts in full breadth:", ", ".join(names) or "none", flush=True)
    return 0 if arguments.list else run(names)


if __name__ == "__main__":
    sys.exit(main())
