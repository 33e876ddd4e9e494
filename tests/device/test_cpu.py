"""What the CPU says of itself: memory within the container's limits, cores, instruction sets."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from octavo.device import cpu
from octavo.device.base import DeviceMemory

GIB = 2**30


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_no_control_group(tmp_path: Path) -> None:
    assert cpu.cgroup_memory(tmp_path) is None


def test_a_control_group_without_a_limit(tmp_path: Path) -> None:
    assert cpu.cgroup_memory(write(tmp_path, {"memory.max": "max\n", "memory.current": "5\n"})) is None


def test_pages_that_the_kernel_gives_back_are_free(tmp_path: Path) -> None:
    files = {
        "memory.max": f"{4 * GIB}\n",
        "memory.current": f"{3 * GIB}\n",
        "memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
    }
    assert cpu.cgroup_memory(write(tmp_path, files)) == DeviceMemory(total_bytes=4 * GIB, free_bytes=2 * GIB)


def test_version_one_of_control_groups(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": f"{2 * GIB}\n", "memory/memory.usage_in_bytes": f"{3 * GIB}\n"}
    assert cpu.cgroup_memory(write(tmp_path, files)) == DeviceMemory(total_bytes=2 * GIB, free_bytes=0)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, DeviceMemory(total_bytes=16 * GIB, free_bytes=10 * GIB)),
        # A container may be promised more than the machine has, or have more of its share left than the machine has.
        (
            DeviceMemory(total_bytes=64 * GIB, free_bytes=60 * GIB),
            DeviceMemory(total_bytes=16 * GIB, free_bytes=10 * GIB),
        ),
        (DeviceMemory(total_bytes=8 * GIB, free_bytes=3 * GIB), DeviceMemory(total_bytes=8 * GIB, free_bytes=3 * GIB)),
    ],
)
def test_the_tightest_limit_counts(
    limit: DeviceMemory | None, expected: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(total=16 * GIB, available=10 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(cpu, "cgroup_memory", lambda root: limit)
    assert cpu.CpuKind().memory() == expected


def test_this_machine() -> None:
    memory = cpu.CpuKind().memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert cpu.usable_cores() >= 1
    assert cpu.cpu_name()
