"""The cores and control groups of this process, as Linux limits it by them: its own group, and all above. No torch.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, `man 7 cgroups`, `man 5 proc`.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes spaces and the like


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One control group: its folder, and the version of the files in it."""

    folder: Path
    version: int

    def number(self, name: str) -> int | None:
        """Return the number in a file; None if there is no such file or it says "max"."""
        text = self.text(name)
        return int(text) if text.removeprefix("-").isdigit() else None

    def text(self, name: str) -> str:
        """Return what a file says; "" if there is none that can be read."""
        try:
            return (self.folder / name).read_text().strip()
        except OSError:  # of the root, of a controller that is not on, or of a group that has just gone
            return ""


def cgroups(controller: str, root: Path = ROOT) -> list[Cgroup]:
    """Return the groups of a controller that limit this process, its own first; of both versions.

    `root` is where `/proc` and `/sys` are, for tests.
    """
    groups, own = [], _own_paths(controller, root)
    for version, mount_root, mount_point in _mounts(controller, root):
        if version not in own:
            continue
        top = root / mount_point.lstrip("/")
        try:
            inside = PurePosixPath(own[version]).relative_to(mount_root)
        except ValueError:  # of another namespace, as in containers: what is mounted begins at the own group
            inside = PurePosixPath()
        if ".." in inside.parts:  # the group is above this namespace's root, of which alone is something to be seen
            inside = PurePosixPath()
        groups += [Cgroup(top / part, version) for part in (inside, *inside.parents)]
    return groups


def _own_paths(controller: str, root: Path) -> dict[int, str]:
    """Return the path of this process's group by version; lines are `4:cpu,cpuacct:/path`, and `0::/path` in v2."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            paths[1] = path
        elif number == "0" and not names:
            paths[2] = path
    return paths


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, str, str]]:
    """Yield version, root and mount point of each mounted hierarchy that has the controller."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        where, kind = mount.split(), source.split()
        if len(where) < 5 or len(kind) < 3:
            continue
        is_v1 = kind[0] == "cgroup" and controller in kind[2].split(",")
        if is_v1 or kind[0] == "cgroup2":
            yield 1 if is_v1 else 2, _plain(where[3]), _plain(where[4])


def _plain(path: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or nothing mounted
        return []


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use: `taskset` or control groups can allow fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in cgroups("cpu", root):
        if group.version == 1:
            quota, period = group.number("cpu.cfs_quota_us"), group.number("cpu.cfs_period_us")  # quota -1: none
        else:  # "max 100000", or CPU time and period in microseconds
            numbers = [int(word) if word.isdigit() else None for word in group.text("cpu.max").split()]
            quota, period = numbers if len(numbers) == 2 else (None, None)
        if quota and period and quota > 0:
            cores = min(cores, max(1, round(quota / period)))
    return cores
