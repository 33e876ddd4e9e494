"""Has the system read files of weights from the disk while earlier tensors are packed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_WINDOW_BYTES = 256 << 20
_PIECE_BYTES = 8 << 20


class ReadAhead:
    """Asks for files in order, a window ahead of what is used: else, threads that pack wait for page after page."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._pieces, self._num_ahead = _ask_for(paths), 0  # bytes asked for and not used yet
        self.used(0)

    def used(self, num_bytes: int) -> None:
        """Go on: so many more bytes were used."""
        self._num_ahead -= num_bytes
        while self._num_ahead < _WINDOW_BYTES and (piece := next(self._pieces, 0)):
            self._num_ahead += piece


def _ask_for(paths: Sequence[Path]) -> Iterator[int]:
    """Ask for one piece after the other; yield their sizes."""
    for path in paths if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size, _PIECE_BYTES):
                os.posix_fadvise(file.fileno(), start, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
                yield min(_PIECE_BYTES, size - start)
