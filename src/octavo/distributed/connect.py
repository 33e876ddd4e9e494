"""`make_groups`: a rank meets the others and gets its groups."""

from typing import TYPE_CHECKING

import torch

from octavo.config.parallel import RankPlace
from octavo.distributed.groups import Group, ParallelGroups, SingleRank
from octavo.distributed.rendezvous import Rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def make_groups(place: RankPlace, rendezvous: Rendezvous, device: torch.device) -> ParallelGroups:
    """Meet the replica's other ranks and return this one's groups. Every rank calls it once, at about the same time.

    Raises:
        RuntimeError: torch's, when not all ranks came in time.
    """
    world_size = place.tp_size * place.pp_size
    if world_size == 1:
        return ParallelGroups()
    from octavo.distributed.torch_backends import open_store

    store = open_store(rendezvous, place.rank, world_size)
    return ParallelGroups(
        tensor=_make_group(store, f"tensor-{place.pp_rank}", place.tp_rank, place.tp_size, rendezvous, device),
        stages=_make_group(store, f"stages-{place.tp_rank}", place.pp_rank, place.pp_size, rendezvous, device),
    )


def _make_group(store: "Store", name: str, rank: int, size: int, rendezvous: Rendezvous, device: torch.device) -> Group:
    if size == 1:
        return SingleRank()
    from octavo.distributed import torch_backends
    from octavo.distributed.torch_group import TorchGroup

    make = torch_backends.nccl if device.type == "cuda" else torch_backends.gloo
    return TorchGroup(make(store, name, rank, size, rendezvous), device)
