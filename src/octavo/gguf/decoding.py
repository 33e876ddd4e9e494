"""Types whose values come from tables of vectors, decoded by ggml's own Python package, which has these tables."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModelError
from octavo.gguf.types import GgmlType


def check_decoder(path: Path, kinds: Iterable[GgmlType]) -> None:
    """Raise UnsupportedModelError where the package is missing, or does not know one of a file's types."""
    for kind in kinds:
        try:
            known = hasattr(import_module("gguf.quants"), kind.name) and _number(kind) is not None
        except ImportError:
            known = False
        if not known:
            what = f"tensors of type {kind.name} are decoded by the package gguf, which is missing or too old"
            raise UnsupportedModelError(f"{path}: {what}: python -m pip install -U 'octavo[gguf]'")


def decode(data: npt.NDArray[np.uint8], kind: GgmlType) -> npt.NDArray[np.float32]:
    """Return the values of rows of bytes, [N, K]."""
    values: npt.NDArray[np.float32] = import_module("gguf.quants").dequantize(data, _number(kind))
    return values


def _number(kind: GgmlType) -> Any:
    return getattr(import_module("gguf").GGMLQuantizationType, kind.name, None)
