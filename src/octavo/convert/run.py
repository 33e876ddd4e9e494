"""Runs a conversion: the result appears whole, or not at all."""

import os
import shutil
from importlib import import_module
from pathlib import Path

from octavo.convert.source import Checkpoint
from octavo.convert.target_options import SINGLE_FILES, TargetOptions
from octavo.convert.targets import TARGETS
from octavo.errors import InvalidParameterError


def convert(checkpoint: Checkpoint, out: Path, to: str, options: TargetOptions) -> int:
    """Write a checkpoint to a new folder, or file, in format `to`. Returns its size in bytes.

    Everything is written to a temporary folder next to `out`, which is then renamed.

    Raises:
        InvalidParameterError: an unknown format, or `out` exists.
        CheckpointError: the source is damaged.
    """
    check(out, to)
    module, function = TARGETS[to]
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        getattr(import_module(module), function)(checkpoint, part, options)
        if to in SINGLE_FILES:
            (part / SINGLE_FILES[to]).rename(out)
            part.rmdir()
            return out.stat().st_size
        for file in part.iterdir():  # libraries write some of them readable by their owner only
            shutil.copymode(part / "config.json", file)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return sum(file.stat().st_size for file in out.iterdir())


def check(out: Path, to: str) -> None:
    """Check the arguments of `convert` before the work.

    Raises:
        InvalidParameterError: an unknown format, or `out` exists.
    """
    if to not in TARGETS:
        raise InvalidParameterError("to", to, "one of " + ", ".join(TARGETS))
    if out.exists():
        raise InvalidParameterError("out", str(out), "a path that does not exist yet; nothing is overwritten")
