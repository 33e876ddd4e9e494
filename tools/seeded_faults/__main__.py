"""Plant faults, one at a time, in a copy of the tree, and see whether the tests notice.

    python -m tools.seeded_faults                    all faults of Python, each with the tests that it names
    python -m tools.seeded_faults --cpp              those of C++, too: each is built (minutes)
    python -m tools.seeded_faults --only router      those with this word in their name
    python -m tools.seeded_faults --whole            all of what `make test` runs, for each fault (hours)
    python -m tools.seeded_faults --check            only whether every fault still applies (`make test` does this)

A C++ build needs cmake, ninja and nanobind in the environment (`make sanitized-folder` installs them).
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tools.seeded_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
SOURCES = "src/octavo"
SUFFIXES = {".py", ".h", ".cpp"}
MODULE_FOLDER = f"{SOURCES}/kernels/cpu"
WHOLE = "-n 3 --dist loadfile --no-loadscope-reorder"
FAILED = 1  # pytest's exit status where tests failed; others mean that it could not run them
# An editable install would import the original.
FIRST_ON_THE_PATH = (
    "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if 'ScikitBuild' not in type(each).__name__]\n"
)


class StaleFaultError(Exception):
    """A fault's text does not stand exactly once in the sources any more."""


def find(fault: Fault, root: Path) -> Path:
    """Return the file in which a fault applies."""
    files = [path for path in sorted((root / SOURCES).rglob("*")) if path.suffix in SUFFIXES]
    counts = {path: path.read_text().count(fault.right) for path in files}
    if sum(counts.values()) != 1:
        places = [str(path.relative_to(root)) for path, count in counts.items() if count]
        raise StaleFaultError(f"{fault.name!r}: its text stands {sum(counts.values())} times {places}: {fault.right!r}")
    return next(path for path, count in counts.items() if count)


class Copy:
    """The tree in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "octavo"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        (self.root / "sitecustomize.py").write_text(FIRST_ON_THE_PATH)
        module = find_spec("octavo.kernels.cpu._cpu")
        if module is not None and module.origin is not None:
            shutil.copy2(module.origin, self.root / MODULE_FOLDER)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (self.root, self.root / "src"))),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        imported = self._run(sys.executable, "-c", "import octavo; print(octavo.__file__)").stdout
        assert str(self.root) in imported, f"the copy is not what is imported: {imported}"

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=self.root, env=self._environment, capture_output=True, text=True, check=False
        )

    def test(self, arguments: str) -> int:
        """Run tests, to the first that fails; return pytest's exit status."""
        chosen = [each if each.startswith("-") else self._path(each) for each in shlex.split(arguments)]
        return self._run(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen).returncode

    def _path(self, argument: str) -> str:
        """Return an argument as it is, or as a path of tests where there is one."""
        return f"tests/{argument}" if (self.root / "tests" / argument).exists() else argument

    def build(self) -> None:
        """Compile the C++ module, as far as it has changed."""
        folder = str(self.root / "build/cpp")
        for command in (
            ["cmake", "-S", ".", "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
             f"-DPython_EXECUTABLE={sys.executable}"],
            ["cmake", "--build", folder, "--target", "_cpu"],
        ):  # fmt: skip
            done = self._run(*command)
            if done.returncode:
                raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        for module in Path(folder).glob("_cpu*.so"):
            shutil.copy2(module, self.root / MODULE_FOLDER)

    def is_caught(self, fault: Fault, tests: str) -> bool:
        """Plant a fault, run tests, and take it out again."""
        path = find(fault, self.root)
        text = path.read_text()
        path.write_text(text.replace(fault.right, fault.wrong))
        try:
            if fault.is_cpp:
                self.build()
            status = self.test(tests)
        finally:
            path.write_text(text)
        if status not in (0, FAILED):
            raise SystemExit(f"{fault.name}: pytest could not run {tests} (exit status {status})")
        return status == FAILED


def choose(arguments: argparse.Namespace) -> list[Fault]:
    wanted = [fault for fault in FAULTS if arguments.only in fault.name]
    return [fault for fault in wanted if arguments.cpp or arguments.check or not fault.is_cpp]


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults one at a time, and see whether the tests notice.")
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--cpp", action="store_true", help="also those that have to be compiled")
    parser.add_argument("--whole", action="store_true", help="run all of `make test`, not the tests that a fault names")
    parser.add_argument("--check", action="store_true", help="only see whether every fault still applies")
    arguments = parser.parse_args()
    faults = choose(arguments)
    for fault in faults:
        find(fault, ROOT)
    if arguments.check:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        if any(fault.is_cpp for fault in faults):
            copy.build()
        missed = [fault for fault in faults if not report(copy, fault, WHOLE if arguments.whole else fault.tests)]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults are caught")
    return len(missed) > 0


def report(copy: Copy, fault: Fault, tests: str) -> bool:
    """Say whether a fault is caught by tests that pass without it."""
    begun_s = time.monotonic()
    if tests != WHOLE and copy.test(tests):
        raise SystemExit(f"{fault.name}: {tests} fails without the fault")
    is_caught = copy.is_caught(fault, tests)
    print(f"{'caught' if is_caught else 'MISSED'}  {fault.name}  ({time.monotonic() - begun_s:.0f} s)", flush=True)
    return is_caught


if __name__ == "__main__":
    sys.exit(main())
