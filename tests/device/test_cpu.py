"""What the CPU says of itself: memory within the container's limits, cores, instruction sets."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from octavo.device import cores, cpu
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


@pytest.mark.parametrize(
    ("quota", "expected"), [("max", 8), ("50000", 1), ("150000", 2), ("300000", 3), ("1600000", 8)]
)
def test_a_share_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cores.usable_cores(tmp_path) == 8
    assert cores.usable_cores(write(tmp_path, {"cpu.max": f"{quota} 100000\n"})) == expected


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(cpu, "usable_cores", lambda: 2)
        cpu.CpuKind().prepare(0)
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(cpu, "usable_cores", lambda: 4)
        cpu.CpuKind().prepare(0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_this_machine() -> None:
    memory = cpu.CpuKind().memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert cores.usable_cores() >= 1
    assert cpu.cpu_name()
