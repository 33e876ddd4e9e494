"""Install peers, each into an environment of its own, never into Octavo's.

    python -m benchmarks.peers.install llama.cpp openvino vllm

Where: see `registry`. What: `requirements/NAME.txt`, every package pinned and named, so that nothing else comes along.
llama.cpp is compiled for this machine (a quarter of an hour of one core; needs cmake, ninja and a C++ compiler): the
library for llama-cpp-python, and `llama-server`, from the sources inside llama-cpp-python's own package.
"""

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.registry import ENGINES, LLAMA_CPP, Peer

# GCC 12 takes the tile shapes for dead stores, as its `_tile_loadconfig` does not say that it reads all 64 bytes, and
# llama.cpp crashes at the first product of quantized weights. A barrier keeps them.
TILE_CALL = "    _tile_loadconfig(&tc);"
TILE_FIX = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n' + TILE_CALL
REQUIREMENTS = Path(__file__).with_name("requirements")
LLAMA_OPTIONS = [
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=ON",
    "GGML_NATIVE=ON",
    "LLAMA_BUILD_SERVER=ON",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
]


def install(peer: Peer, jobs: int) -> None:
    """Make the environment anew where it is not complete.

    Raises:
        subprocess.CalledProcessError: when pip or the compiler fails.
    """
    pip = [str(peer.home / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    peer.home.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(peer.home / "venv")], check=True)
    requirements = REQUIREMENTS / f"{peer.name}.txt"
    environment = dict(os.environ)
    if peer is LLAMA_CPP:
        build_llama(peer.home, pip, requirements, jobs)
        environment["CMAKE_ARGS"] = "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"  # the library is built already
    subprocess.run([*pip, "install", "--no-deps", "-r", str(requirements)], check=True, env=environment)
    (peer.home / "installed").write_text(requirements.read_text())


def build_llama(home: Path, pip: list[str], requirements: Path, jobs: int) -> None:
    """Compile llama.cpp with every unit of this machine into `home/build`."""
    [package] = [line for line in requirements.read_text().splitlines() if line.startswith("llama_cpp_python==")]
    download = ["download", "--no-deps", "--no-binary", ":all:", "--dest", str(home), package]
    subprocess.run([*pip, *download], check=True)
    [archive] = home.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(home, filter="data")
    source = home / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    keep_tile_shapes(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    options = [f"-D{option}" for option in LLAMA_OPTIONS]
    subprocess.run(["cmake", "-S", str(source), "-B", str(home / "build"), "-G", "Ninja", *options], check=True)
    targets = ["--target", "llama", "llama-server", "--parallel", str(jobs)]
    subprocess.run(["cmake", "--build", str(home / "build"), *targets], check=True)


def keep_tile_shapes(file: Path) -> None:
    """Put the barrier before the one place where llama.cpp sets the shapes of tiles."""
    text = file.read_text()
    if text.count(TILE_CALL) != 1:
        raise RuntimeError(f"{file.name} does not set tile shapes as this installer knows it: look again")
    file.write_text(text.replace(TILE_CALL, TILE_FIX))


def main() -> None:
    installable = [name for name, peer in ENGINES.items() if peer.has_environment]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", choices=installable)
    parser.add_argument("--jobs", type=int, default=1, help="files compiled at once")
    options = parser.parse_args()
    for name in options.peers:
        install(ENGINES[name], options.jobs)


if __name__ == "__main__":
    main()
