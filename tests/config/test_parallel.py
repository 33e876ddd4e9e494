"""Ranks find their place, and the default executor follows from their number."""

import pytest

from octavo.config.parallel import ParallelConfig, RankPlace


def test_consecutive_ranks_share_a_stage() -> None:
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    places = [RankPlace.of(rank, config) for rank in range(config.world_size)]
    assert [(place.pp_rank, place.tp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.rank for place in places if place.returns_output] == [4]


@pytest.mark.parametrize(("degree", "backend"), [(1, "uniproc"), (2, "mp")])
def test_the_backend_follows_from_the_number_of_ranks(degree: int, backend: str) -> None:
    assert ParallelConfig(tensor_parallel_size=degree).backend == backend
    assert ParallelConfig(tensor_parallel_size=degree, distributed_executor_backend="ray").backend == "ray"
