"""Ranks in threads of this process: each has groups of its own, made as in processes, and no start-up to pay for."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier
from typing import TypeVar

import torch

from octavo.config.parallel import ParallelConfig, RankPlace, Rendezvous
from octavo.distributed.connect import make_groups
from octavo.distributed.groups import ParallelGroups

ResultT = TypeVar("ResultT")
_PATIENCE_S = 60.0


@contextmanager
def meeting() -> Iterator[Rendezvous]:
    """Give a place for ranks of this process to meet while the block lasts.

    The store's file stays open for good. A store that goes late, say with the traceback of a step that failed, opens it
    once more by its number, and must not find another engine's there: it would read it for ever, or abort.
    """
    store_fd, memory_fd = os.memfd_create("store"), os.memfd_create("memory")
    try:
        yield Rendezvous(store_fd=store_fd, memory_fd=memory_fd)
    finally:
        os.close(memory_fd)


def run_ranks(
    body: Callable[[ParallelGroups], ResultT], tp_size: int, pp_size: int = 1, *, shares_memory: bool = True
) -> list[ResultT]:
    """Call body(groups of a rank) in every rank at once; return the results in the order of ranks."""
    config = ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)

    with meeting() as rendezvous, ThreadPoolExecutor(config.world_size) as threads:
        place_to_meet = rendezvous if shares_memory else replace(rendezvous, memory_fd=None)

        # Gloo fails to connect to a rank that has ended already, as one with nothing to add may.
        all_connected = Barrier(config.world_size, timeout=_PATIENCE_S)

        def run_rank(rank: int) -> ResultT:
            groups = make_groups(RankPlace.of(rank, config), place_to_meet, torch.device("cpu"))
            all_connected.wait()
            return body(groups)

        return list(threads.map(run_rank, range(config.world_size)))
