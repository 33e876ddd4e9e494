"""`make_groups`: connects a rank to the others and builds its groups."""

from typing import Any

import torch

from octavo.config.parallel import RankPlace
from octavo.distributed.groups import Group, ParallelGroups, SingleRank
from octavo.distributed.rendezvous import Rendezvous


def make_groups(place: RankPlace, rendezvous: Rendezvous, device: torch.device) -> ParallelGroups:
    """Meet the replica's other ranks and return this rank's groups. Every rank calls this once, at about the same time.

    Raises:
        RuntimeError: from torch, if not all ranks arrive in time.
    """
    if place.tp_size * place.pp_size == 1:
        return ParallelGroups()
    meeting = _Meeting(place, rendezvous, device)
    return ParallelGroups(tensor=meeting.tensor_group(), stages=meeting.stages_group())


class _Meeting:
    """The rendezvous of several ranks. A single rank needs no torch.distributed and never comes here."""

    def __init__(self, place: RankPlace, rendezvous: Rendezvous, device: torch.device) -> None:
        from octavo.distributed import torch_backends

        self._place, self._rendezvous, self._device = place, rendezvous, device
        self._connect = torch_backends.nccl if device.type == "cuda" else torch_backends.gloo
        self._store = torch_backends.open_store(rendezvous, place.rank, place.tp_size * place.pp_size)

    def tensor_group(self) -> Group:
        """Group the ranks of one stage: over shared memory if they share a host and the C++ kernels are available."""
        from octavo.distributed.shared_memory import SharedMemoryGroup, make_collective
        from octavo.distributed.torch_group import TorchGroup

        place, memory_fd = self._place, self._rendezvous.memory_fd
        if place.tp_size == 1:
            return SingleRank()
        backend = self._backend(f"tensor-{place.pp_rank}", place.tp_rank, place.tp_size)
        if memory_fd is not None and self._device.type == "cpu":
            collective = make_collective(memory_fd, place.pp_rank, place.pp_size, place.tp_rank, place.tp_size)
            if collective is not None:
                return SharedMemoryGroup(backend, self._device, collective)
        return TorchGroup(backend, self._device)

    def stages_group(self) -> Group:
        """Group the ranks that hold the same shard in every stage."""
        from octavo.distributed.torch_group import TorchGroup

        place = self._place
        if place.pp_size == 1:
            return SingleRank()
        return TorchGroup(self._backend(f"stages-{place.tp_rank}", place.pp_rank, place.pp_size), self._device)

    def _backend(self, name: str, rank: int, size: int) -> Any:
        return self._connect(self._store, name, rank, size, self._rendezvous)
