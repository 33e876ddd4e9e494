"""Executors whose ranks are real processes; at the end nothing of them is left."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.executor.processes import descendants
from tests.executor.ranks import make_config

from octavo.executor.multiproc import MultiprocExecutor

MakeExecutor = Callable[..., MultiprocExecutor]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def make_executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeExecutor]:
    """Make executors, not started; in the end they exit, and this process has what it had before."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # ranks import the tests' own worker
    before = possessions()
    made: list[MultiprocExecutor] = []

    def make(**options: Any) -> MultiprocExecutor:
        made.append(MultiprocExecutor(make_config(**options), "tests.executor.ranks:WilfulRank"))
        return made[-1]

    yield make
    for executor in made:
        executor.exit()
        executor.exit()  # twice is as good as once
    assert possessions() == before


def possessions() -> dict[str, object]:
    """Return what a leak would show in: open descriptors, children, and names in shared memory."""
    fds = (os.path.realpath(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd"))
    return {
        "descriptors": sorted(kind for kind in fds if not kind.startswith("/proc")),
        "children": descendants(os.getpid()),
        "shared memory": sorted(os.listdir("/dev/shm")),
    }
