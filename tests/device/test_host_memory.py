"""Freed memory stays at hand, unless the user said otherwise. In processes of their own: it is for good."""

import subprocess
import sys

import pytest

from octavo.device.host_memory import keep_freed_memory

_COUNT_FAULTS = """
import resource, sys
from octavo.device.host_memory import keep_freed_memory
import torch
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def use():
    first = torch.ones(5 << 20, dtype=torch.float32)  # 20 MiB: 5,120 pages
    rest = [first + first for _ in range(5)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", _COUNT_FAULTS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator only")
def test_tensors_that_come_and_go_take_far_fewer_fresh_pages() -> None:
    assert 0 < 2 * faults("keep") < faults("leave")


def test_the_users_environment_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
