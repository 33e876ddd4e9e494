"""Full KV blocks of one rank on disk: copied out of the caches of its layers and read back into them.

A folder holds the blocks of one set of weights, kernels, dtypes, geometry and rank, and of one of the engines that run
at the same time: `prefix/DIGEST-NUMBER` in `$OCTAVO_CACHE`, locked while in use. What the system has in memory of these
files needs no disk to be read, so they are the host's memory for blocks, too.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from octavo.attention.metadata import LayerCache
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.contracts.stored import BlocksWritten, StoreOpened
from octavo.worker.block_file import BlockFile, check_private, open_private
from octavo.worker.block_memory import Bytes, block_memory

logger = logging.getLogger(__name__)


class BlockStore:
    """Raises OSError wherever the system does, on opening; later, errors are in results.

    `facts` is everything that contents depend on, besides the geometry.
    """

    def __init__(
        self, root: Path, spec: KVCacheSpec, caches: Sequence[LayerCache], facts: object, *, is_host: bool
    ) -> None:
        """`is_host`: steps compute on the host, one at a time. Else what has been read must be `place`d."""
        self._root, self._facts, self._is_host = root, [facts, repr(spec)], is_host
        self._memory = [
            block_memory([caches[layer] for layer in of.layers], of.entries_per_block(spec.block_size), is_host=is_host)
            for of in spec.groups
        ]
        self._files: list[BlockFile] = []
        self._lock: int | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._helper: ThreadPoolExecutor | None = None  # of the reader

    def open(self, number: int, max_bytes: int) -> StoreOpened:
        """Lock and open the files with this number; delete those of others that nobody uses, if above `max_bytes`."""
        digest = hashlib.sha256(json.dumps(self._facts, default=str).encode()).hexdigest()[:32]
        folder = self._root / f"{digest}-{number}"
        try:
            for each in (self._root, folder):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_private(each, each.lstat())
            self._lock = open_private(folder / "lock")
            if not _try_lock(self._lock):
                self.close()
                return StoreOpened(state="busy")
            os.utime(folder)  # marks it as used now
            for part in folder.glob("*.part"):  # its writer was killed
                part.unlink()
            _make_room(self._root, folder, max_bytes)
            found = []
            for group, memory in enumerate(self._memory):
                self._files.append(BlockFile(folder, str(group), memory.block_bytes, digest))
                found.append(self._files[-1].read_index())
        except OSError as error:
            self.close()
            return StoreOpened(state="refused", reason=str(error))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="octavo-prefix-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="octavo-prefix-reader")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="octavo-prefix-helper")
        damaged = sum((file.damaged for file in self._files), start=Counter[str]())
        sizes = [file.slot_bytes for file in self._files]
        return StoreOpened(
            state="open", slot_bytes=sizes, found=found, damaged=dict(damaged), is_placed=not self._is_host
        )

    def limit(self, counts: Sequence[int]) -> None:
        """Keep at most so many slots of each group."""
        for file, count in zip(self._files, counts, strict=True):
            file.limit(count)

    def save(
        self, groups: list[int], block_ids: list[int], slots: list[int], hashes: list[bytes]
    ) -> Future[BlocksWritten]:
        """Copy blocks now, and write them to slots in a thread."""
        assert self._writer is not None, "the store is open"
        start_s = time.thread_time()
        copies: dict[int, Bytes] = {}
        for group in sorted(set(groups)):
            at = [index for index, of in enumerate(groups) if of == group]
            out = np.empty((len(at), self._memory[group].block_bytes), dtype=np.uint8)
            self._memory[group].copy([block_ids[index] for index in at], out)
            copies |= dict(zip(at, out, strict=True))
        return self._writer.submit(self._write, groups, slots, hashes, copies, time.thread_time() - start_s)

    def _write(
        self, groups: list[int], slots: list[int], hashes: list[bytes], copies: dict[int, Bytes], copied_s: float
    ) -> BlocksWritten:
        start_s, error = time.thread_time(), ""
        try:
            for index, (group, slot, block_hash) in enumerate(zip(groups, slots, hashes, strict=True)):
                self._files[group].write(slot, block_hash, copies[index].data)
        except OSError as problem:
            error = os.strerror(problem.errno) if problem.errno else str(problem)
        return BlocksWritten(took_s=copied_s + time.thread_time() - start_s, error=error)

    def read(
        self, groups: list[int], block_ids: list[int], slots: list[int], hashes: list[bytes]
    ) -> Future[list[tuple[int, str]]]:
        """Read blocks from slots, in threads, into memory that no step uses.

        The future's result is those that are zeroed instead: their index, and what is wrong.
        """
        assert self._reader is not None, "the store is open"
        places = list(zip(range(len(groups)), groups, block_ids, slots, hashes, strict=True))
        return self._reader.submit(self._read_all, places)

    def _read_all(self, places: Sequence[tuple[int, int, int, int, bytes]]) -> list[tuple[int, str]]:
        """Read half of the blocks in another thread: checksums and copies take longer than the system."""
        assert self._helper is not None, "the store is open"
        half = len(places) // 2
        others = self._helper.submit(self._read, places[half:])
        return [*self._read(places[:half]), *others.result()]

    def _read(self, places: Sequence[tuple[int, int, int, int, bytes]]) -> list[tuple[int, str]]:
        failed = []
        for index, group, block_id, slot, block_hash in places:
            memory = self._memory[group]
            try:
                problem = self._files[group].read(slot, block_hash, memory.target(block_id))
            except OSError as error:
                problem = f"unreadable ({errno.errorcode.get(error.errno or 0, 'unknown')})"
            if problem:
                memory.zero(block_id)
                failed.append((index, problem))
        return failed

    def place(self, groups: list[int], block_ids: list[int]) -> None:
        """Put blocks that have been read where steps find them, in order with the steps."""
        for group, memory in enumerate(self._memory):
            if own := [block_id for of, block_id in zip(groups, block_ids, strict=True) if of == group]:
                memory.place(own)

    def drop(self, groups: list[int], slots: list[int]) -> Future[None]:
        """Forget the blocks of slots, after those that are being written."""
        assert self._writer is not None, "the store is open"
        return self._writer.submit(self._clear, groups, slots)

    def _clear(self, groups: list[int], slots: list[int]) -> None:
        for group, slot in zip(groups, slots, strict=True):
            try:
                self._files[group].clear(slot)
            except OSError as error:  # the block stays on disk, and is found again by the next engine
                logger.warning("a block of the prefix cache cannot be deleted: %s", error)

    def close(self) -> None:
        """End the threads and close the files. What waits to be written is not."""
        for threads in (self._writer, self._reader, self._helper):
            if threads is not None:
                threads.shutdown(cancel_futures=True)
        self._writer = self._reader = self._helper = None
        while self._files:
            self._files.pop().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_room(root: Path, own: Path, max_bytes: int) -> None:
    """Delete the least recently used folders that nobody uses, until the others take at most `max_bytes` together."""
    sizes: dict[Path, tuple[float, int]] = {}  # time of the last use, bytes on disk
    for each in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another engine makes room, too
            if each != own and each.is_dir():
                num_bytes = sum(file.stat().st_blocks * 512 for file in each.iterdir())
                sizes[each] = each.stat().st_mtime, num_bytes
    total = sum(num_bytes for _, num_bytes in sizes.values())
    for each in sorted(sizes, key=sizes.__getitem__):
        if total <= max_bytes:
            return
        with contextlib.suppress(FileNotFoundError):
            fd = open_private(each / "lock")
            try:
                if _try_lock(fd):
                    shutil.rmtree(each)
                    total -= sizes[each][1]
            finally:
                os.close(fd)
