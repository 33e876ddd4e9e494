"""How much memory the server and its processes use, by use, as Linux counts it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FIELDS = {"RssAnon": "anonymous", "RssFile": "files", "RssShmem": "shared"}
_PROC = Path("/proc")


def process_memory() -> list[dict[str, Any]]:
    """Return for this process and each below it: its program, and bytes resident by kind. Empty without `/proc`."""
    found = []
    for pid in _family(os.getpid()):
        try:
            lines = (_PROC / str(pid) / "status").read_text().splitlines()
            words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        sizes = {name: 1024 * int(line.split()[1]) for line in lines if (name := _FIELDS.get(line.split(":")[0]))}
        if sizes:
            found.append({"pid": pid, "program": _program(words), **sizes})
    return found


def _program(words: list[bytes]) -> str:
    """Return what a process runs: a module of ours, or the program without its path."""
    module = next((word for word in words if word.startswith(b"octavo.")), words[0])
    return Path(module.decode(errors="replace")).name


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # there is no `/proc`, or the process has ended
        return
    for child in children:
        yield from _family(child)
