"""A checkpoint in OpenVINO's form, by Optimum's exporter: weights in 16, 8 or 4 bits.

    python -m benchmarks.peers.openvino_export FOLDER [--precision int4]

Runs in OpenVINO's environment; nothing is fetched. Four bits: symmetric, groups of 128, the embedding in 8 bits, which
is what the exporter does by itself.
"""

import argparse
import subprocess
import sys
from pathlib import Path

WEIGHTS = {
    "bf16": ["--weight-format", "fp16"],  # widened and rounded to bf16 when it is compiled for a CPU with that unit
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
}


def make(folder: Path, weights: str) -> Path:
    """Return the folder of the exported model, made if there is none yet.

    Raises:
        subprocess.CalledProcessError: when the exporter fails.
    """
    target = folder / f"openvino-{weights}"
    if not target.exists():
        unfinished = folder / f"openvino-{weights}.new"
        exporter = str(Path(sys.executable).with_name("optimum-cli"))
        task = ["export", "openvino", "--model", str(folder), "--task", "text-generation-with-past"]
        subprocess.run([exporter, *task, *WEIGHTS[weights], str(unfinished)], check=True)
        unfinished.rename(target)
    return target


def weights_of(precision: str) -> str:
    """Return what the weights of `int8+kv8` are."""
    return precision.removesuffix("+kv8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    print(make(options.folder, weights_of(options.precision)))


if __name__ == "__main__":
    main()
