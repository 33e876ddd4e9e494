"""Groups of several ranks: over torch's backends (Gloo between CPUs, NCCL between CUDA devices), or shared memory.

torch's default process group is not used, so there is no global state and a process may hold several ranks. On one
host, Octavo's C++ kernels sum one row between two ranks in 2 us, Gloo in 370 us (benchmarks/results); that can be
recorded on a tape of native calls. Pipeline stages still use Gloo.

Legend: T = tokens, N = values per row, B = bytes per row.
"""

import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from octavo.distributed.groups import Group
from octavo.kernels.native_weights import native_dtype

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu

_MAX_SENDS = 16  # in flight; a rank that is further ahead waits for its peer
# Polls before a rank sleeps: about 50 us, or few if ranks outnumber cores and another needs this one.
_NUM_SPINS, _NUM_SPINS_WHERE_CROWDED = 1500, 20


class TorchGroup(Group):
    """Sums are gathered and then added locally, because no backend guarantees an order."""

    is_recordable = False

    def __init__(self, backend: Any, device: torch.device) -> None:
        """Wrap `backend`, a torch.distributed.Backend (torch's type stubs lack its collectives)."""
        self._backend, self._device = backend, device
        self.rank, self.size = backend.rank(), backend.size()
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()  # torch's Work and its buffer

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_in_order(self._gather(x))

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, max(sizes) - x.shape[1]))  # [T, largest]: backends need equal sizes
        return torch.cat([part[:, :size] for part, size in zip(self._gather(padded), sizes, strict=True)], dim=1)

    def all_to_all(self, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        came = torch.empty(self.size, dtype=torch.int64, device=self._device)
        self._backend.alltoall_base(came, torch.tensor(counts, device=self._device), [], []).wait()
        came_counts = [int(count) for count in came.tolist()]
        rows = torch.empty(sum(came_counts), *x.shape[1:], dtype=x.dtype, device=self._device)
        self._backend.alltoall_base(_bytes(rows), _bytes(x), came_counts, list(counts)).wait()
        return rows, came_counts

    def barrier(self) -> None:
        self._gather(torch.zeros(1, 1, device=self._device))

    def send(self, x: torch.Tensor, to: int) -> None:
        copy = _bytes(x.clone(memory_format=torch.contiguous_format))
        self._sends.append((self._backend.send([copy], to, 0), copy))
        while self._sends and (self._sends[0][0].is_completed() or len(self._sends) > _MAX_SENDS):
            self._sends.popleft()[0].wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        x = torch.empty(*shape, dtype=dtype, device=self._device)
        self._backend.recv([_bytes(x)], source, 0).wait()
        return x

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's x, all of one shape, in rank order."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._backend.allgather([[_bytes(part) for part in parts]], [_bytes(x)]).wait()
        return parts


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape, added in order in float32 and rounded once."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View x [T, N] as bytes [T, B], so that backends need not support its dtype."""
    return x.contiguous().view(torch.uint8)


class SharedMemoryGroup(TorchGroup):
    """Ranks of one host."""

    is_recordable = True

    def __init__(self, backend: Any, device: torch.device, collective: "_cpu.Collective") -> None:
        super().__init__(backend, device)
        self._collective = collective

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        num_rows, size = x.shape
        self._collective.all_reduce(x.data_ptr(), num_rows, size, native_dtype(x.dtype))
        return x

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), sum(sizes), dtype=x.dtype)
        row_bytes = [size * x.itemsize for size in sizes]
        self._collective.all_gather(x.data_ptr(), out.data_ptr(), len(x), row_bytes)
        return out

    def all_to_all(self, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        x = x.contiguous()
        all_counts = self._collective.exchange_counts(list(counts))
        came_counts = [sent[self.rank] for sent in all_counts]
        out = torch.empty(sum(came_counts), x.shape[1], dtype=x.dtype)
        self._collective.all_to_all(x.data_ptr(), out.data_ptr(), x.shape[1] * x.itemsize, all_counts)
        return out, came_counts

    def barrier(self) -> None:
        self._collective.barrier()


def make_collective(memory_fd: int, index: int, num_groups: int, rank: int, size: int) -> "_cpu.Collective | None":
    """Map the memory of group number `index`; return None without C++ kernels."""
    from octavo.kernels.dispatch import native_kernels

    if (kernels := native_kernels()) is None:
        return None
    from octavo.kernels.cpu import _cpu

    num_bytes = _cpu.Collective.memory_size(size)
    os.ftruncate(memory_fd, num_groups * num_bytes)  # idempotent: the same size on every rank
    is_crowded = len(os.sched_getaffinity(0)) < size * num_groups
    num_spins = _NUM_SPINS_WHERE_CROWDED if is_crowded else _NUM_SPINS
    return _cpu.Collective(kernels.native.level, memory_fd, index * num_bytes, rank, size, num_spins)
