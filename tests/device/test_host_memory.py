"""Freed memory stays at hand, unless the user said otherwise. In processes of their own: it is for good."""

import platform
import subprocess
import sys

import pytest

from octavo.device.process import keep_freed_memory

# glibc counts the blocks that it maps apart; such a block goes back to the system when it is freed.
_COUNT_MAPPED = """
import ctypes, sys
from octavo.device.process import keep_freed_memory
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks r4 r5 r6 r7 r8 r9".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = libc.mallinfo2().hblks
assert libc.malloc(24 << 20)
print(libc.mallinfo2().hblks - before)
"""


def num_mapped_apart(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", _COUNT_MAPPED, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_a_tensors_memory_comes_from_the_heap_that_is_kept() -> None:
    assert num_mapped_apart("keep") == 0
    assert num_mapped_apart("leave") == 1


def test_the_users_environment_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
