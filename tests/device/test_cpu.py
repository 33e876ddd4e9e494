"""What the CPU says of itself: memory within the container's limits, cores, instruction sets."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from octavo.device import cgroups, cpu
from octavo.device.base import DeviceMemory

GIB = 2**30


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


V2 = "41 31 0:38 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "33 31 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 {root} /sys/fs/cgroup/my\\040memory rw shared:9 - cgroup cgroup rw,memory\n"
)


def machine(folder: Path, own: str, mounts: str, groups: dict[str, str]) -> Path:
    """A machine with a process in the groups `own`, and files below /sys/fs/cgroup."""
    write(folder / "proc/self", {"cgroup": own, "mountinfo": "22 1 0:21 / / rw - ext4 /dev/a rw\n" + mounts})
    write(folder / "sys/fs/cgroup", groups)
    return folder


def memory_files(limit: object, used: int = 0, high: object = "max", cache: int = 0, at: str = "") -> dict[str, str]:
    """Return the files of a group of version 2."""
    files = {"max": limit, "high": high, "current": used, "stat": f"anon 5\ninactive_file {cache}\nfile 7"}
    return {f"{at}memory.{name}": f"{value}\n" for name, value in files.items()}


def test_no_control_group(tmp_path: Path) -> None:
    assert cpu.cgroup_memory(tmp_path) is None
    no_limit = machine(tmp_path, "0::/\n", V2.format(root="/"), memory_files("max"))
    assert cpu.cgroup_memory(no_limit) is None


def test_pages_that_the_kernel_gives_back_are_free(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", V2.format(root="/"), memory_files(4 * GIB, used=3 * GIB, cache=GIB))
    assert cpu.cgroup_memory(root) == DeviceMemory(total_bytes=4 * GIB, free_bytes=2 * GIB)


def test_the_tightest_group_on_the_path_counts(tmp_path: Path) -> None:
    groups = (
        memory_files(3 * GIB, used=3 * GIB - 5, at="a.slice/")  # the least is free here
        | memory_files("max", used=GIB, high=2 * GIB, at="a.slice/b c/")  # the smallest limit
        | memory_files(8 * GIB, at="a.slice/b c/own:1/")
        | memory_files(GIB, at="other/")
        | {"a.slice/cpu.max": "100000 100000\n", "other/cpu.max": "5000 100000\n"}
        | {"a.slice/b c/own:1/cpu.max": "max 100000\n"}
    )
    root = machine(tmp_path, "1:name=systemd:/other\n0::/a.slice/b c/own:1\n", V2.format(root="/"), groups)
    assert cpu.cgroup_memory(root) == DeviceMemory(total_bytes=2 * GIB, free_bytes=5)
    assert cgroups.usable_cores(root) == 1


@pytest.mark.parametrize(
    ("own", "mount_root", "folder"),
    [
        ("/docker/abc", "/docker/abc", ""),  # a container without a namespace
        ("/docker/abc/sub", "/docker/abc", "sub/"),
        ("/", "/", ""),  # in its own namespace
        ("/", "/../..", ""),  # a mount from outside
        ("/../b", "/..", "b/"),
        ("/kubepods/pod/abc", "/", ""),  # the group's own folder is not to be seen
    ],
)
def test_groups_of_containers(own: str, mount_root: str, folder: str, tmp_path: Path) -> None:
    root = machine(tmp_path, f"0::{own}\n", V2.format(root=mount_root), memory_files(GIB, at=folder))
    assert cpu.cgroup_memory(root) == DeviceMemory(total_bytes=GIB, free_bytes=GIB)


def test_version_one_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    groups = {
        "my memory/memory.limit_in_bytes": "9223372036854771712\n",  # none
        "my memory/memory.usage_in_bytes": "7\n",
        "my memory/x/memory.limit_in_bytes": f"{2 * GIB}\n",
        "my memory/x/memory.usage_in_bytes": f"{GIB}\n",
        "my memory/x/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/y/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/y/cpu.cfs_period_us": "50000\n",
    }
    own = "9:memory:/x\n4:cpu,cpuacct:/y/z\n2:cpuset:/q\n0::/unified\n"
    root = machine(tmp_path, own, V1.format(root="/"), groups)
    assert cpu.cgroup_memory(root) == DeviceMemory(total_bytes=2 * GIB, free_bytes=3 * GIB // 2)
    assert cgroups.usable_cores(root) == 3


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
    monkeypatch.setattr(cpu, "cgroup_memory", lambda: limit)
    assert cpu.CpuKind().memory() == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("max", 8), ("50000", 1), ("150000", 2), ("300000", 3), ("1600000", 8)]
)
def test_a_share_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cgroups.usable_cores(tmp_path) == 8
    root = machine(tmp_path, "0::/\n", V2.format(root="/"), {"cpu.max": f"{quota} 100000\n"})
    assert cgroups.usable_cores(root) == expected


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
    assert cgroups.usable_cores() >= 1
    assert cpu.cpu_name()
