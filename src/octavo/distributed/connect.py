"""`make_groups`: connects a rank to the others and builds its groups.

Over torch's stores and communication backends, without its default process group. They are imported from where
torch.distributed gets them; torch builds without distributed support lack that module.
"""

from datetime import timedelta
from typing import Any

import torch

from octavo.config.parallel import RankPlace, Rendezvous
from octavo.distributed.collectives import SharedMemoryGroup, TorchGroup, make_collective
from octavo.distributed.groups import Group, ParallelGroups, SingleRank

# For all ranks to arrive: they may have to import torch first, on a busy machine.
_MEETING_TIMEOUT = timedelta(minutes=2)
# For one collective. A rank may wait while another computes; dead ranks are detected by the executor.
_TIMEOUT = timedelta(minutes=30)


def make_groups(place: RankPlace, rendezvous: Rendezvous, device: torch.device) -> ParallelGroups:
    """Meet the replica's other ranks and return this rank's groups. Every rank calls this once, at about the same time.

    Raises RuntimeError, from torch, if not all ranks arrive in time.
    """
    if place.tp_size * place.pp_size == 1:
        return ParallelGroups()
    meeting = _Meeting(place, rendezvous, device)
    return ParallelGroups(tensor=meeting.tensor_group(), stages=meeting.stages_group())


class _Meeting:
    """The rendezvous of several ranks. A single rank needs no torch.distributed and never comes here."""

    def __init__(self, place: RankPlace, rendezvous: Rendezvous, device: torch.device) -> None:
        from torch._C import _distributed_c10d as c10d

        self._c10d: Any = c10d
        self._place, self._rendezvous, self._device = place, rendezvous, device
        world_size = place.tp_size * place.pp_size
        if rendezvous.store_fd is not None:
            self._store: Any = c10d.FileStore(f"/proc/self/fd/{rendezvous.store_fd}", world_size)
            self._store.set_timeout(_MEETING_TIMEOUT)
            return
        assert rendezvous.store_address is not None, "several ranks need a store"
        host, _, port = rendezvous.store_address.rpartition(":")
        self._store = c10d.TCPStore(
            host,
            int(port),
            world_size,
            is_master=place.rank == 0,
            timeout=_MEETING_TIMEOUT,
            master_listen_fd=rendezvous.listen_fd,
        )

    def tensor_group(self) -> Group:
        """Group the ranks of one stage: over shared memory if they share a host and the C++ kernels are available."""
        place, memory_fd = self._place, self._rendezvous.memory_fd
        if place.tp_size == 1:
            return SingleRank()
        backend = self._connect(f"tensor-{place.pp_rank}", place.tp_rank, place.tp_size)
        if memory_fd is not None and self._device.type == "cpu":
            collective = make_collective(memory_fd, place.pp_rank, place.pp_size, place.tp_rank, place.tp_size)
            if collective is not None:
                return SharedMemoryGroup(backend, self._device, collective)
        return TorchGroup(backend, self._device)

    def stages_group(self) -> Group:
        """Group the ranks that hold the same shard in every stage."""
        place = self._place
        if place.pp_size == 1:
            return SingleRank()
        return TorchGroup(self._connect(f"stages-{place.tp_rank}", place.pp_rank, place.pp_size), self._device)

    def _connect(self, name: str, rank: int, size: int) -> Any:
        """Connect CUDA devices by NCCL, which chooses the transport, CPUs by Gloo over TCP."""
        store = self._c10d.PrefixStore(name, self._store)
        if self._device.type == "cuda":
            options = self._c10d.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return self._c10d.ProcessGroupNCCL(store, rank, size, options)
        gloo = self._c10d.ProcessGroupGloo
        options = gloo._Options()  # what torch.distributed itself calls
        options._devices = [gloo.create_device(hostname=self._rendezvous.host)]
        options._timeout = _TIMEOUT
        return gloo(store, rank, size, options)
