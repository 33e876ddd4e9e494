"""A self-test of about two seconds, for bug reports: whether results are exact, and how fast memory and disk are."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from octavo.device.cgroups import ROOT, cgroups, usable_cores
from octavo.device.cpu import cgroup_memory
from octavo.device.manager import DeviceManager
from octavo.kernels.dispatch import describe_level
from octavo.kernels.reference import Kernels

_ROWS, _INPUTS, _OUTPUTS = 33, 512, 384
_BANDWIDTH_BYTES, _DISK_BYTES = 256 * 2**20, 64 * 2**20
_TURNS = 5
_GIB, _GB = 2**30, 1e9
# Of the largest result: what rounding inputs, weights and results to a dtype may change.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def self_check(device: DeviceManager, cache: Path) -> dict[str, str]:
    """Return what was found, by what was looked at. Nothing raises: a check that fails says so in its text."""
    checks: dict[str, Callable[[], str]] = {
        "exactness": lambda: exactness(device),
        "kernel level": describe_level if device.device.type == "cpu" else lambda: device.device.type,
        "memory bandwidth": memory_bandwidth,
        "limits": limits,
        "cache folder": lambda: disk(cache),
    }
    return {name: _tried(check) for name, check in checks.items()}


def _tried(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - what fails on a machine is what a report is for
        return f"FAILED: {type(error).__name__}: {error}"


def exactness(device: DeviceManager) -> str:
    """Say, for each dtype, whether a linear of the device is right, and has the same bits whatever the batch."""
    found = []
    for dtype, tolerance in _TOLERANCE.items():
        kernels, name = device.kernels(dtype), str(dtype).removeprefix("torch.")
        found.append(f"{name} {_exactness_of(kernels, dtype, device.device, tolerance)}")
    return "; ".join(found)


def _exactness_of(kernels: Kernels, dtype: torch.dtype, device: torch.device, tolerance: float) -> str:
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(_OUTPUTS, _INPUTS, generator=source)  # [N, K]
    x = torch.randn(_ROWS, _INPUTS, generator=source)  # [T, K]
    right = x.double() @ weight.double().T  # [T, N]
    packed = kernels.pack_linear(weight.to(device, dtype), None)
    inputs = x.to(device, dtype)
    together = kernels.linear(inputs, packed)
    alone = torch.cat([kernels.linear(inputs[row : row + 1], packed) for row in range(_ROWS)])
    error = ((together.cpu().double() - right).abs().max() / right.abs().max()).item()
    if not error <= tolerance:
        return f"WRONG by {error:.2g}, {tolerance:.2g} is rounding"
    is_equal = torch.equal(together, alone)
    if kernels.is_batch_invariant and not is_equal:
        return "WRONG: not the same bits in every batch"
    return "the same bits in every batch" if is_equal else "right, other bits in other batches"


def memory_bandwidth() -> str:
    """Say how fast all threads read memory that is in no cache, as torch's sum does."""
    data = torch.ones(_BANDWIDTH_BYTES // 4)
    best_s = min(_time_s(data.sum) for _ in range(_TURNS))
    threads = torch.get_num_threads()
    return f"{_BANDWIDTH_BYTES / best_s / _GB:.1f} GB/s read by {threads} {'thread' if threads == 1 else 'threads'}"


def limits(root: Path = ROOT) -> str:
    """Say what limits this process: cores, control groups, open files, shared memory."""
    cores, memory = usable_cores(root), cgroup_memory(root)
    versions = sorted({group.version for group in cgroups("memory", root)})
    group = f"cgroup v{'/v'.join(map(str, versions))}" if versions else "no cgroup"
    limit = "no memory limit" if memory is None else f"{memory.total_bytes / _GIB:.1f} GiB of memory"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = Path("/dev/shm")
    parts = [f"{cores} of {os.cpu_count()} cores", f"{group}: {limit}", f"{files} open files"]
    if shared.is_dir():
        parts.append(f"/dev/shm {psutil.disk_usage(str(shared)).free / _GIB:.1f} GiB free")
    return ", ".join(parts)


def disk(folder: Path) -> str:
    """Say how fast the disk of a folder writes, synced, and reads what is not in memory; leaves nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    free = psutil.disk_usage(str(folder)).free
    if free < 2 * _DISK_BYTES:
        return f"{folder}: {free / 2**20:.0f} MiB free, too full to measure"
    path, block = folder / f"self-check-{os.getpid()}", os.urandom(2**20)

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for _ in range(_DISK_BYTES // len(block)):
                os.write(descriptor, block)
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):  # so that the disk is read, not memory
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    try:
        write_s = _time_s(write)
        read_s = _time_s(path.read_bytes)
    finally:
        path.unlink(missing_ok=True)
    rates = f"writes {_DISK_BYTES / write_s / _GB:.2f} GB/s, reads {_DISK_BYTES / read_s / _GB:.2f} GB/s"
    return f"{folder}: {rates}, {free / _GIB:.0f} GiB free"


def _time_s(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
