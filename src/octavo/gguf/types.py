"""How the elements of a tensor are stored: row by row, in blocks of a fixed number of elements and bytes."""

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import CheckpointError

MAGIC = b"GGUF"
_FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A storage format. Rows consist of whole blocks."""

    name: str
    block_size: int  # elements
    block_bytes: int
    is_decoded: bool = False  # to floats at load, by ggml's own Python package; no kernels compute with such blocks

    @property
    def is_quantized(self) -> bool:
        """Whether blocks hold integers with scales; else elements are floats."""
        return self.name not in _FLOATS

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a row of `size` elements, a multiple of `block_size`."""
        return size // self.block_size * self.block_bytes


# ggml's enum ggml_type. Missing numbers were withdrawn, or are formats that no published model uses.
GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", 256, 136),
    30: GgmlType("BF16", 1, 2),
    39: GgmlType("MXFP4", 32, 17),
}
GGML_NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
# Their values come from tables of vectors, which that package has (the last three: from none).
_DECODED = {
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 40: ("NVFP4", 64, 36),
}  # fmt: skip
DECODED_TYPES = {number: GgmlType(*kind, is_decoded=True) for number, kind in _DECODED.items()}
READ_TYPES = {**GGML_TYPES, **DECODED_TYPES}
# Unsupported; names are for error messages.
UNREAD_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF, by its magic bytes. Raises CheckpointError: the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
