"""Changes of block tables in a step: allocated blocks, and null blocks in place of freed ones.

Legend: N = changes.
"""

import numpy as np

from octavo.contracts.schedule import CachedRequestData


class TableChanges:
    """Four lists of N numbers, which become the columns of `CachedRequestData`."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._block_ids: list[int] = []
        self._groups: list[int] = []
        self._columns: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, group: int, first_column: int, block_ids: list[int]) -> None:
        """Record that a row's table of a KV group has these blocks from `first_column` on."""
        count = len(block_ids)
        self._rows += [row] * count
        self._block_ids += block_ids
        self._groups += [group] * count
        self._columns += range(first_column, first_column + count)

    def drop(self, row: int) -> None:
        """Discard a row's changes: its request was preempted."""
        kept = [index for index, changed in enumerate(self._rows) if changed != row]
        for numbers in (self._rows, self._block_ids, self._groups, self._columns):
            numbers[:] = [numbers[index] for index in kept]

    def diffs(self) -> CachedRequestData:
        numbers = np.array((self._rows, self._block_ids, self._groups, self._columns), dtype=np.int32)
        return CachedRequestData(rows=numbers[0], block_ids=numbers[1], groups=numbers[2], columns=numbers[3])
