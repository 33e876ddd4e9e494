"""Executors whose ranks are real processes; at the end nothing of them is left."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
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
    assert possessions() <= before  # what earlier tests have left may have gone meanwhile


def possessions() -> Counter[tuple[str, object]]:
    """Return what a leak would show in: open descriptors, children, and names in shared memory."""
    fds = (os.path.realpath(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd"))
    return Counter(
        [
            *(("descriptor", kind) for kind in fds if not kind.startswith("/proc")),
            *(("child", pid) for pid in descendants(os.getpid())),
            *(("shared memory", name) for name in {*os.listdir("/dev/shm")} - names_of_others()),
        ]
    )


def names_of_others() -> set[str]:
    """Return the names in shared memory that programs beside this one have open: other workers run tests, too."""
    if not os.listdir("/dev/shm"):  # nearly always
        return set()
    ours = {os.getpid(), *descendants(os.getpid())}
    others = [process for process in psutil.process_iter() if process.pid not in ours]
    names: set[str] = set()
    for process in others:
        with suppress(psutil.Error):  # gone meanwhile, or somebody else's
            names |= {Path(mapped.path).name for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")}
    return names
