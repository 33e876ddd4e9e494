"""Prefaulting of KV memory: how far ahead, in which order, and without support from the system."""

import pytest
import torch

from octavo.attention.metadata import LayerKVCache
from octavo.kernels.large_pages import LARGE_PAGE_BYTES
from octavo.worker import kv_cache
from octavo.worker.kv_cache import KVPrefault

NUM_BLOCKS, BLOCK_BYTES = 10, LARGE_PAGE_BYTES // 4  # two pages and a half of each tensor
MUCH = 1 << 40  # memory of a machine
Calls = list[tuple[int, int, int]]  # tensor, start, size


def make_caches(device: str = "cpu") -> list[LayerKVCache]:
    """Return two layers, that is, four tensors, never written."""
    tensors = [torch.empty(NUM_BLOCKS, 1, BLOCK_BYTES, dtype=torch.uint8, device=device) for _ in range(4)]
    return [LayerKVCache(key=tensors[0], value=tensors[1]), LayerKVCache(key=tensors[2], value=tensors[3])]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record what is brought in, tensor by tensor in the order of their first page."""
    made: Calls = []
    addresses: list[int] = []

    def record(tensor: torch.Tensor, start: int, num_bytes: int) -> bool:
        if tensor.data_ptr() not in addresses:
            addresses.append(tensor.data_ptr())
        made.append((addresses.index(tensor.data_ptr()), start, num_bytes))
        return True

    monkeypatch.setattr(kv_cache, "prefault", record)
    return made


def run(prefault: KVPrefault, num_reached_blocks: int) -> None:
    while prefault.step(num_reached_blocks):
        pass


def test_all_tensors_advance_together_to_their_ends(calls: Calls) -> None:
    run(KVPrefault(make_caches(), NUM_BLOCKS, MUCH), 0)
    page = LARGE_PAGE_BYTES
    expected = [(0, page), (page, page), (2 * page, page // 2)]
    assert calls == [(tensor, start, size) for start, size in expected for tensor in range(4)]


def test_a_latent_layers_memory_is_prefaulted_once(calls: Calls) -> None:
    vectors = make_caches()[0].key
    run(KVPrefault([LayerKVCache(vectors, vectors[..., :100])], NUM_BLOCKS, MUCH), 0)
    assert [(tensor, start) for tensor, start, _ in calls] == [(0, page * LARGE_PAGE_BYTES) for page in range(3)]


FOUR_BLOCKS = 4 * 4 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("limit", "value"),
    [("_MAX_AHEAD_BYTES", FOUR_BLOCKS), ("_MAX_AHEAD_TOKENS", 4), ("_MAX_AHEAD_SHARE", MUCH // FOUR_BLOCKS)],
)
def test_it_stays_so_far_ahead_of_the_blocks_in_use(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(kv_cache, limit, value)  # four blocks, of a token each
    prefault = KVPrefault(make_caches(), NUM_BLOCKS, MUCH)
    for num_reached_blocks, num_pages in ((0, 1), (0, 1), (1, 2), (4, 2), (5, 3), (10, 3)):
        run(prefault, num_reached_blocks)
        assert len(calls) == 4 * num_pages
    assert not prefault.step(10)


def test_a_system_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(tensor: torch.Tensor, start: int, num_bytes: int) -> bool:
        asked.append(start)
        return False

    monkeypatch.setattr(kv_cache, "prefault", refuse)
    prefault = KVPrefault(make_caches(), NUM_BLOCKS, MUCH)
    assert not prefault.step(0)
    assert not prefault.step(0)
    assert asked == [0]


def test_memory_of_a_device_is_left_alone(calls: Calls) -> None:
    assert not KVPrefault(make_caches("meta"), NUM_BLOCKS, MUCH).step(0)
    assert calls == []
