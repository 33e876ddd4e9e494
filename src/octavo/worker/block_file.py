"""Blocks of one KV group of one rank, on disk: a file with a slot for each, and an index with an entry for each slot.

    NAME.index    a header of 4096 bytes, then 48 bytes for each slot: hash, number of the write, checksums
    NAME.blocks   the blocks, each in its slot of a multiple of 4096 bytes

An entry is cleared before its slot is written and written after it. So a process may be killed at any time, and what
the disk itself loses or changes is found by a checksum: of the block and its hash, when it is read; of the entry, when
the file is opened. The index is made under another name and then moved, so its header is whole or not there.
"""

import json
import os
import stat
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from zlib import crc32

_HEADER_BYTES = 4096
_FORM = 1  # version of names and contents
_ENTRY = struct.Struct("<32sQII")  # hash, number of the write, checksum of hash and block, checksum of slot and entry
_SLOT_ALIGNMENT = 4096
_MAX_PIECES = 512  # of one system call: the limit is 1024
_FREE = bytes(_ENTRY.size)

Piece = memoryview


class BlockFile:
    """Open files. Raises OSError wherever the system does; PermissionError: they may belong to somebody else."""

    def __init__(self, folder: Path, name: str, block_bytes: int, facts: object) -> None:
        """`facts` is what the contents depend on: files with others, or of another version, are begun anew."""
        self.slot_bytes = max(1, -(-block_bytes // _SLOT_ALIGNMENT)) * _SLOT_ALIGNMENT
        self._block_bytes = block_bytes
        self._checksums: dict[int, tuple[bytes, int]] = {}  # of each slot with a block: hash, checksum
        self._num_writes = 0
        self.damaged: Counter[str] = Counter()  # what was found on opening, by what is wrong
        header = _header([_FORM, block_bytes, facts])
        index = folder / f"{name}.index"
        if not _has_header(index, header):
            if index.exists():
                self.damaged["of another format"] += 1
            _begin(index, header)
            (folder / f"{name}.blocks").unlink(missing_ok=True)
        self._index = open_private(index)
        try:
            self._blocks = open_private(folder / f"{name}.blocks")
        except OSError:
            os.close(self._index)
            raise

    def read_index(self) -> list[tuple[int, bytes]]:
        """Return the slots that hold a block, with its hash, in the order in which they were written."""
        size = os.fstat(self._index).st_size - _HEADER_BYTES
        num_slots = os.fstat(self._blocks).st_size // self.slot_bytes
        data = os.pread(self._index, max(0, size), _HEADER_BYTES)
        if len(data) % _ENTRY.size or num_slots > len(data) // _ENTRY.size:
            self.damaged["truncated"] += 1
        numbers: dict[int, int] = {}
        for slot in range(len(data) // _ENTRY.size):
            entry = data[slot * _ENTRY.size : (slot + 1) * _ENTRY.size]
            if entry == _FREE:
                continue
            block_hash, number, checksum, own = _ENTRY.unpack(entry)
            if own != _entry_checksum(slot, entry):
                self.damaged["damaged"] += 1
            elif slot >= num_slots:
                self.damaged["truncated"] += 1
            else:
                self._checksums[slot], numbers[slot] = (block_hash, checksum), number
                continue
            self.clear(slot)
        self._num_writes = max(numbers.values(), default=0)
        return [(slot, self._checksums[slot][0]) for slot in sorted(numbers, key=numbers.__getitem__)]

    def limit(self, num_slots: int) -> None:
        """Give up all slots from this one on."""
        index_bytes = _HEADER_BYTES + num_slots * _ENTRY.size
        for fd, size in (self._index, index_bytes), (self._blocks, num_slots * self.slot_bytes):
            if os.fstat(fd).st_size > size:
                os.truncate(fd, size)

    def write(self, slot: int, block_hash: bytes, block: Piece) -> None:
        """Write a block [block bytes] to a slot, in place of another."""
        self._set_entry(slot, _FREE)
        padded = [block, memoryview(bytes(self.slot_bytes - self._block_bytes))]  # so the file ends with a whole slot
        _write_all(self._blocks, padded, slot * self.slot_bytes)
        self._num_writes += 1
        checksum = crc32(block, crc32(block_hash))
        entry = _ENTRY.pack(block_hash, self._num_writes, checksum, 0)
        entry = _ENTRY.pack(block_hash, self._num_writes, checksum, _entry_checksum(slot, entry))
        self._set_entry(slot, entry)
        self._checksums[slot] = block_hash, checksum

    def read(self, slot: int, block_hash: bytes, pieces: Sequence[Piece]) -> str:
        """Read the block with this hash into `pieces`, which add up to it; return what is wrong, or nothing."""
        found, expected = self._checksums.get(slot, (b"", 0))
        if found != block_hash:
            return "missing"
        num_read, checksum = 0, crc32(block_hash)
        for first in range(0, len(pieces), _MAX_PIECES):
            part = pieces[first : first + _MAX_PIECES]
            num_read += os.preadv(self._blocks, part, slot * self.slot_bytes + num_read)
            for piece in part:
                checksum = crc32(piece, checksum)
        if num_read < self._block_bytes:
            return "truncated"
        return "" if checksum == expected else "damaged"

    def clear(self, slot: int) -> None:
        """Forget the block of a slot."""
        if os.fstat(self._index).st_size > _HEADER_BYTES + slot * _ENTRY.size:
            self._set_entry(slot, _FREE)

    def _set_entry(self, slot: int, entry: bytes) -> None:
        self._checksums.pop(slot, None)
        _write_all(self._index, [memoryview(entry)], _HEADER_BYTES + slot * _ENTRY.size)

    def close(self) -> None:
        os.close(self._index)
        os.close(self._blocks)


def open_private(path: Path) -> int:
    """Open a file for reading and writing, and create it if necessary.

    Raises PermissionError: it is not a file, or somebody else owns it or may write to it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        check_private(path, os.fstat(fd))
    except PermissionError:
        os.close(fd)
        raise
    return fd


def check_private(path: Path, found: os.stat_result) -> None:
    """Raise PermissionError if somebody else may write to a file or folder."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise PermissionError(f"{path} is neither a file nor a folder")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o})")


def _header(facts: object) -> bytes:
    text = json.dumps(["octavo kv blocks", facts], default=str).encode()
    assert len(text) <= _HEADER_BYTES, f"{len(text)} bytes of facts"
    return text.ljust(_HEADER_BYTES)


def _has_header(path: Path, header: bytes) -> bool:
    if not path.exists():
        return False
    fd = open_private(path)
    try:
        return os.pread(fd, _HEADER_BYTES, 0) == header
    finally:
        os.close(fd)


def _begin(path: Path, header: bytes) -> None:
    with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:  # mode 600
        try:
            part.write(header)
            part.flush()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def _entry_checksum(slot: int, entry: bytes) -> int:
    return crc32(entry[: _ENTRY.size - 4], crc32(slot.to_bytes(8, "little")))


def _write_all(fd: int, pieces: Sequence[Piece], offset: int) -> None:
    """Write all of `pieces`; a full disk may take a part of them first, and then raises."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        count = os.pwritev(fd, left, offset)
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
