"""An embedding table in the blocks of a GGUF file: rows are dequantized on lookup.

Legend: T = tokens, V = rows, D = size of a row, R = bytes of a row.
"""

import torch

from octavo.gguf.types import GgmlType
from octavo.kernels.ggml_blocks import dequantize
from octavo.layers.table_in_file import TableInFile


class BlockTable:
    """Rows [V, R] of bytes, in memory or in their file."""

    def __init__(self, stored: torch.Tensor | TableInFile, kind: GgmlType) -> None:
        self.stored, self._kind = stored, kind

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows ids [T] as float32 [T, D]. See `TableInFile.rows` for what it raises."""
        stored = self.stored
        found = stored.rows(ids) if isinstance(stored, TableInFile) else stored.index_select(0, ids)
        return dequantize(found, self._kind)
