"""Ranks in threads of this process: each has groups of its own, made as in processes, and no start-up to pay for."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from octavo.config.parallel import ParallelConfig, RankPlace
from octavo.distributed.connect import make_groups
from octavo.distributed.groups import ParallelGroups
from octavo.distributed.rendezvous import Rendezvous

ResultT = TypeVar("ResultT")


def run_ranks(
    body: Callable[[ParallelGroups], ResultT], tp_size: int, pp_size: int = 1, *, shares_memory: bool = True
) -> list[ResultT]:
    """Call body(groups of a rank) in every rank at once; return the results in the order of ranks."""
    config = ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)

    files = os.memfd_create("store"), os.memfd_create("memory")
    rendezvous = Rendezvous(store_fd=files[0], memory_fd=files[1] if shares_memory else None)

    def run_rank(rank: int) -> ResultT:
        return body(make_groups(RankPlace.of(rank, config), rendezvous, torch.device("cpu")))

    try:
        with ThreadPoolExecutor(config.world_size) as threads:
            return list(threads.map(run_rank, range(config.world_size)))
    finally:
        for file in files:
            os.close(file)
