"""Who lives, and whose child it is, as the kernel says it."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, oldest first. A parent that is gone has none: its children have another."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [child for child, parent in parents.items() if parent == pid]
    for child in found:  # grows meanwhile
        found.extend(grandchild for grandchild, parent in parents.items() if parent == child)
    return sorted(found)


def ranks_below(pid: int) -> list[int]:
    """Return the processes of ranks below `pid`, in the order in which they were started: that of ranks."""
    return [child for child in descendants(pid) if b"octavo.worker.worker_proc" in _read(child, "cmdline")]


def are_gone(pids: Iterable[int]) -> bool:
    """True when all have ended, even where their parents have not asked how."""
    return all(fields[:1] in ([], ["Z"]) for fields in map(_stat, pids))


def wait_until(is_true: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.01)


def _stat(pid: int) -> list[str]:
    """Return state, parent and so on; nothing where there is no such process."""
    return _read(pid, "stat").rpartition(b")")[2].decode().split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
