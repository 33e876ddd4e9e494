"""Runs a conversion to one of the formats that `octavo convert` writes: the result appears whole, or not at all."""

import os
import shutil
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from octavo.convert.source import SINGLE_FILES, Checkpoint, TargetOptions
from octavo.errors import InvalidParameterError

# name -> module and function, imported on demand, and the options that have an effect. A function takes a `Checkpoint`,
# an empty folder and the options.
TARGETS = MappingProxyType(
    {
        "safetensors": ("octavo.convert.folders", "write_safetensors", ("max_shard_bytes",)),
        "pt": ("octavo.convert.folders", "write_torch", ("max_shard_bytes",)),
        "gguf": ("octavo.convert.gguf_file", "write_gguf", ("gguf_type",)),
        "sharded_state": ("octavo.convert.folders", "write_sharded", ("max_shard_bytes", "tensor_parallel_size")),
        "tensorizer": ("octavo.convert.folders", "write_tensorized", ()),
    }
)


def convert(checkpoint: Checkpoint, out: Path, to: str, options: TargetOptions) -> int:
    """Write a checkpoint to a new folder, or file, in format `to`. Returns its size in bytes.

    Everything is written to a temporary folder next to `out`, which is then renamed. Raises InvalidParameterError: an
    unknown format, an option without effect on it, or `out` exists. CheckpointError: the source is damaged.
    """
    check(out, to)
    module, function, has_effect = TARGETS[to]
    for name, value in asdict(options).items():
        if value is not None and name not in has_effect:
            raise InvalidParameterError(name, value, f"unset: it has no effect on {to}")
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
    if to not in TARGETS:
        raise InvalidParameterError("to", to, "one of " + ", ".join(TARGETS))
    if out.exists():
        raise InvalidParameterError("out", str(out), "a path that does not exist yet; nothing is overwritten")
