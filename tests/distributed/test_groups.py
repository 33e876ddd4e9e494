"""Groups of ranks: what they compute is what one rank would, in one order of adding, for any sizes."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.distributed.ranks import run_ranks

from octavo.config.parallel import ALONE, ParallelConfig, RankPlace, Rendezvous
from octavo.distributed.collectives import SharedMemoryGroup, sum_in_order
from octavo.distributed.connect import make_groups
from octavo.distributed.groups import ParallelGroups

# Both kinds of groups, where there are both: without a compiler all talk by Gloo.
both_kinds = pytest.mark.parametrize("shares_memory", [True, False])

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) * 10.0**rank).to(dtype)


# The last is larger than what ranks take at a time; from the one before on, more than two ranks add a stripe each.
@both_kinds
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (0, 4), (3, 3001), (600, 1000)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_adds_in_the_order_of_ranks(size: int, shape: tuple[int, int], shares_memory: bool) -> None:
    def body(groups: ParallelGroups) -> list[torch.Tensor]:
        return [groups.tensor.all_reduce(_values(groups.tensor.rank, *shape, dtype=dtype)) for dtype in _DTYPES]

    results = run_ranks(body, size, shares_memory=shares_memory)
    for index, dtype in enumerate(_DTYPES):
        wide = _values(0, *shape, dtype=dtype).float()
        for rank in range(1, size):
            wide += _values(rank, *shape, dtype=dtype).float()
        for result in results:
            assert torch.equal(result[index], wide.to(dtype))


def test_sums_in_another_order_would_show() -> None:
    parts = [torch.tensor([[big]]) for big in (1e8, -1e8, 1.0)]
    assert sum_in_order(parts).item() == 1.0
    assert sum_in_order(parts[::-1]).item() == 0.0


@both_kinds
@pytest.mark.parametrize(("rows", "sizes"), [(2, [4, 1, 3]), (1, [300_000, 600_001, 5]), (700, [513, 0, 1024])])
def test_all_gather_puts_columns_of_uneven_numbers_side_by_side(
    rows: int, sizes: list[int], shares_memory: bool
) -> None:
    def body(groups: ParallelGroups) -> torch.Tensor:
        return groups.tensor.all_gather(_values(groups.tensor.rank, rows, sizes[groups.tensor.rank]), sizes)

    expected = torch.cat([_values(rank, rows, size) for rank, size in enumerate(sizes)], 1)
    assert all(torch.equal(result, expected) for result in run_ranks(body, 3, shares_memory=shares_memory))


@both_kinds
@pytest.mark.parametrize(
    ("counts", "width"), [([[2, 0, 3], [1, 4, 0], [0, 0, 0]], 3), ([[0, 500, 700], [900, 1, 0], [0, 0, 1]], 1000)]
)
def test_all_to_all_deals_uneven_numbers_of_rows(counts: list[list[int]], width: int, shares_memory: bool) -> None:
    sent = [_values(source, sum(counts[source]), width, dtype=torch.bfloat16) for source in range(3)]

    def body(groups: ParallelGroups) -> tuple[torch.Tensor, list[int]]:
        return groups.tensor.all_to_all(sent[groups.tensor.rank], counts[groups.tensor.rank])

    sharded = [torch.split(x, counts[source]) for source, x in enumerate(sent)]
    for rank, (rows, came) in enumerate(run_ranks(body, 3, shares_memory=shares_memory)):
        assert came == [counts[source][rank] for source in range(3)]
        assert torch.equal(rows, torch.cat([parts[rank] for parts in sharded]))


@both_kinds
def test_nobody_passes_a_barrier_before_all_have_come(shares_memory: bool) -> None:
    came: list[int] = []

    def body(groups: ParallelGroups) -> int:
        for _ in range(50):
            came.append(groups.tensor.rank)
            groups.tensor.barrier()
        groups.tensor.barrier()
        return len(came)

    assert run_ranks(body, 3, shares_memory=shares_memory) == [150] * 3
    for at in range(0, 150, 3):
        assert sorted(came[at : at + 3]) == [0, 1, 2]


def test_stages_send_to_one_another_in_order_and_may_overwrite_what_they_sent() -> None:
    def body(groups: ParallelGroups) -> list[torch.Tensor]:
        stages = groups.stages
        if stages.rank > 0:
            return [stages.receive((step + 1, 3), torch.bfloat16, source=0) for step in range(20)]
        x = torch.empty(20, 3, dtype=torch.bfloat16)
        for step in range(20):
            stages.send(x[: step + 1].fill_(groups.tensor.rank * 100 + step), to=1)
        stages.barrier()
        return []

    def body_and_wait(groups: ParallelGroups) -> list[torch.Tensor]:
        received = body(groups)
        if groups.stages.rank > 0:
            groups.stages.barrier()
        return received

    results = run_ranks(body_and_wait, tp_size=2, pp_size=2)
    for tp_rank in range(2):
        for step, x in enumerate(results[2 + tp_rank]):
            assert torch.equal(x, torch.full((step + 1, 3), tp_rank * 100 + step, dtype=torch.bfloat16))


def test_ranks_meet_at_an_address_too() -> None:
    config = ParallelConfig(tensor_parallel_size=2)
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def run_rank(rank: int) -> torch.Tensor:
        rendezvous = Rendezvous(store_address=address, listen_fd=listener.detach() if rank == 0 else None)
        groups = make_groups(RankPlace.of(rank, config), rendezvous, torch.device("cpu"))
        result = groups.tensor.all_reduce(torch.full((1, 2), rank + 1.0))
        groups.tensor.barrier()
        return result

    with ThreadPoolExecutor(2) as threads:
        assert [result.tolist() for result in threads.map(run_rank, range(2))] == [[[3.0, 3.0]]] * 2


def test_who_waits_for_a_rank_that_has_left_is_told() -> None:
    def body(groups: ParallelGroups) -> str:
        if not isinstance(groups.tensor, SharedMemoryGroup):
            pytest.skip("the C++ kernels are not built, or switched off")
        groups.tensor.barrier()
        if groups.tensor.rank == 1:
            return "left"
        with pytest.raises(RuntimeError, match="rank 1 of the group has left") as caught:
            groups.tensor.all_reduce(torch.ones(3, 4))
        return str(caught.value)

    assert run_ranks(body, 2)[1] == "left"


def test_one_rank_needs_nobody() -> None:
    groups = make_groups(ALONE, Rendezvous(), torch.device("cpu"))
    x = torch.ones(2, 3)
    assert groups.tensor.all_reduce(x) is x
    assert groups.tensor.all_gather(x, [3]) is x
    assert groups.stages.size == 1
