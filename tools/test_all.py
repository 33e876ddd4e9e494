"""Run the tests in full breadth: all of them, or the parts whose sources have changed.

    python -m tools.test_all                        everything (`make test-all` runs this)
    python -m tools.test_all kernels schedules      these parts
    python -m tools.test_all --changed              parts touched since the last release tag, or by the last 50 commits
    python -m tools.test_all --changed --list       say which those are, and run nothing
    python -m tools.test_all --changed --budget 10  stop after ten minutes, and say what was left out

With a budget, parts run one after the other, beginning with another one at each commit: what one run leaves out, a
later one has. The first failure ends the run.

Full breadth is TEST_BREADTH=all: see `tests/breadth.py`. `make test` runs the same tests in less breadth.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUM_COMMITS = 50
PYTEST = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
GRACE_S = 60.0  # for what is interrupted to end its processes
FAILED = 1  # pytest's exit status where tests failed


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
            *("kernels/triton/", "attention/triton", "kernels/quantiz", "kernels/rotation"),
            "device/",
        ),
    ),
    "models": Part(
        tests=(
            "tests/models/",
            "tests/loader/",
            "tests/config/",
            "tests/demo/",
            "tests/gguf/",
            "tests/convert/",
            "tests/calibration/",
        ),
        sources=("models/", "layers/", "loader/", "config/", "demo/", "gguf/", "convert/", "calibration/"),
    ),
    "engines": Part(  # equality of every path, storms, ranks in processes
        tests=(
            *("tests/end_to_end/", "tests/worker/", "tests/executor/", "tests/distributed/", "tests/multimodal/"),
            "tests/lora/",
        ),
        sources=(
            "worker/",
            "executor/",
            "distributed/",
            "scheduler/",
            "sampling/",
            "speculative/",
            "lora/",
            "multimodal/",
            "llm.py",
        ),
    ),
    "schedules": Part(  # thousands of random schedules
        tests=("tests/scheduler/", "tests/contracts/", "tests/speculative/"),
        sources=("scheduler/", "contracts/", "speculative/", "testing/"),
    ),
    "text": Part(  # random grammars, texts and cuts
        tests=("tests/structured/", "tests/tokenizer/", "tests/engine/", "tests/metrics/", "tests/test_"),
        sources=("structured", "tokenizer/", "engine/", "metrics/", "inputs.py", "outputs.py", "sampling_params.py"),
    ),
    "servers": Part(  # hostile clients, crowds
        tests=("tests/server/", "tests/hostile/", "tests/cli/", "tests/chaos/"),
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


def commands_of(names: list[str]) -> list[list[str]]:
    """Return what runs these parts: those of pytest in one go, then the others."""
    files = sorted({file for name in names for file in files_of(PARTS[name])})
    commands = [[*PARTS[name].command] for name in names if PARTS[name].command]
    return [[*PYTEST, *files], *commands] if files else commands


def run(names: list[str]) -> int:
    """Run parts. Return the first exit status that is not 0."""
    return next((status for command in commands_of(names) if (status := run_command(command))), 0)


def run_within(names: list[str], budget_s: float) -> int:
    """Run parts one after the other, as far as the time goes. Return the first exit status that is not 0."""
    end_s = time.monotonic() + budget_s
    for at, name in enumerate(names):
        for command in commands_of([name]):
            stops_at_failure = ["-x"] if command[: len(PYTEST)] == PYTEST else []
            status = run_command(command + stops_at_failure, max(0.0, end_s - time.monotonic()))
            if status is None:
                rest = ", ".join(names[at + 1 :]) or "none"
                print(f"out of time: {name} was cut short, without a failure so far; not run: {rest}", flush=True)
                return 0
            if status:
                return status
    return 0


def run_command(command: list[str], limit_s: float | None = None) -> int | None:
    """Run a command in full breadth. Return its exit status, or None where the limit ended it."""
    environment = {**os.environ, "TEST_BREADTH": "all"}
    # A group of its own can be interrupted as Ctrl-C would, with all its children.
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=limit_s is not None) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        try:
            status = process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return status if status == FAILED else None


def in_turns(names: list[str]) -> list[str]:
    """Return the parts, beginning with another one at each commit."""
    first = int(_git("rev-list", "--count", "HEAD") or 0) % max(1, len(names))
    return names[first:] + names[:first]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests in full breadth.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--changed", action="store_true", help="only parts whose sources have changed")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="stop after so long, and say what was left out")
    parser.add_argument("--list", action="store_true", help="name the parts, and run nothing")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.parts} - {*PARTS})
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    names: list[str] = arguments.parts or list(PARTS)
    if arguments.changed and (files := changed_files()) is not None:
        asked_for = parts_for(files)
        names = [name for name in names if name in asked_for]
    if arguments.budget is not None:
        names = in_turns(names)
    print("parts in full breadth:", ", ".join(names) or "none", flush=True)
    if arguments.list:
        return 0
    return run(names) if arguments.budget is None else run_within(names, arguments.budget * 60.0)


if __name__ == "__main__":
    sys.exit(main())
