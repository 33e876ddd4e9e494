"""A group over torch's backends: Gloo between CPUs on one or more hosts, NCCL between CUDA devices.

Does not use torch's default process group, so there is no global state and a process may hold several ranks.

Legend: T = tokens, N = values per row, B = bytes per row.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from octavo.distributed.groups import Group

_MAX_SENDS = 16  # in flight; a rank that is further ahead waits for its peer


class TorchGroup(Group):
    """See `Group`. Sums are gathered and then added locally, because no backend guarantees an order."""

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
