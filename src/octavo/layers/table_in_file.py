"""A table that stays in its file: rows are read on lookup and not kept in memory.

A mapping would not do: each lookup faults in 64 KiB around the row, and random tokens soon fault in the whole table.

Legend: T = tokens, V = rows, D = size of a row.
"""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch

from octavo.errors import CheckpointError

_MAPPINGS = Path("/proc/self/maps")  # Linux; the only way to find a tensor's file


class TableInFile:
    """Rows [V, D] of a file. Like a mapped file, it may be replaced or deleted meanwhile, but not written to."""

    def __init__(self, path: str, offset: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._path, self._offset = path, offset
        self._row_bytes = shape[1] * dtype.itemsize
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    @classmethod
    def from_mapped(cls, table: torch.Tensor) -> Self | None:
        """Return the table [V, D] in its file, if it is a mapped file; None for other memory."""
        if table.device.type != "cpu" or not table.is_contiguous() or not len(table):
            return None
        place = _place_in_file(table.data_ptr(), table.nbytes)
        if place is None:
            return None
        found, ends = cls(*place, table.shape, table.dtype), torch.tensor([0, len(table) - 1])
        is_same = torch.equal(found.rows(ends).view(torch.uint8), table[ends].view(torch.uint8))
        return found if is_same else None  # another file has this path now

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self._row_bytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows ids [T] of the table: [T, D]."""
        rows = torch.empty(len(ids), self.shape[1], dtype=self.dtype)
        for row, place in zip(ids.tolist(), rows.view(torch.uint8).numpy(), strict=True):
            if not 0 <= row < self.shape[0]:
                raise IndexError(f"row {row} of a table of {self.shape[0]}")
            self._check_size(os.preadv(self._file, [place], self._offset + row * self._row_bytes), self._row_bytes)
        return rows

    def pieces(self, num_bytes: int) -> Iterator[bytes]:
        """Yield all bytes in order, in pieces of this size."""
        end = self._offset + self.nbytes
        for start in range(self._offset, end, num_bytes):
            piece = os.pread(self._file, min(num_bytes, end - start), start)
            self._check_size(len(piece), min(num_bytes, end - start))
            yield piece

    def _check_size(self, found: int, expected: int) -> None:
        if found != expected:
            raise CheckpointError(f"{self._path}: {found} bytes instead of {expected}: truncated while in use")


def _place_in_file(address: int, num_bytes: int) -> tuple[str, int] | None:
    """Return the path and offset mapped at an address; None if it is not all one file. See proc(5)."""
    for line in _MAPPINGS.read_text().splitlines() if _MAPPINGS.exists() else ():
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(limit, 16) for limit in addresses.split("-"))
        if start <= address < end:
            is_file = inode != "0" and path and address + num_bytes <= end
            return (path[0], int(offset, 16) + address - start) if is_file and Path(path[0]).is_file() else None
    return None
