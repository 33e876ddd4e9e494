"""Memory on large pages: ordinary tensors of zeros, which the system was asked to back by large pages."""

import re
import sys
from pathlib import Path

import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.conftest import native
from tests.kernels.levels import LEVELS
from tests.marks import needs_populate

from octavo.kernels.large_pages import LARGE_PAGE_BYTES, SharedPages, prefault, zeros_on_large_pages


def mapping_of(address: int) -> dict[str, list[str]]:
    """Return what the system says about the memory at an address: see proc(5), smaps."""
    is_there, fields = False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_there:
            name, _, values = line.partition(":")
            fields[name] = values.split()
    assert fields, f"nothing is mapped at {address:#x}"
    return fields


def flags_of(address: int) -> list[str]:
    return mapping_of(address)["VmFlags"]


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")


@each("shape", [(0,), (3, 5), (LARGE_PAGE_BYTES // 4,), (1023, 1025)])
@each("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_zeros_of_any_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeros_on_large_pages(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert not tensor.any()
    assert bool((tensor.fill_(1) == 1).all())


@needs_linux
def test_large_ones_are_asked_for_on_large_pages() -> None:
    assert "hg" in flags_of(zeros_on_large_pages((LARGE_PAGE_BYTES,), torch.uint8).data_ptr())


@each("dtype", pick([torch.bfloat16], [torch.uint8, torch.bfloat16, torch.float32]))
def test_neighbors_share_pages_and_no_bytes(dtype: torch.dtype) -> None:
    pages = SharedPages()
    sizes = [3, 0, 1000, LARGE_PAGE_BYTES, 9 * LARGE_PAGE_BYTES // 4, 40 * LARGE_PAGE_BYTES // dtype.itemsize, 5]
    tensors = [pages.zeros(size, dtype) for size in sizes * 3]
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        tensor.fill_(number)
    assert [len(tensor) for tensor in tensors] == sizes * 3
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert tensors[0].untyped_storage().data_ptr() == tensors[2].untyped_storage().data_ptr()


@needs_linux
@pytest.mark.parametrize("level", LEVELS)
def test_so_are_packed_weights(level: str) -> None:
    packed = native(level, 2).pack_linear(torch.zeros(1024, 1024, dtype=torch.bfloat16), None)
    assert "hg" in flags_of(packed.weight.data_ptr())


@needs_populate
def test_memory_comes_before_it_is_written() -> None:
    tensor = zeros_on_large_pages((4 * LARGE_PAGE_BYTES,), torch.uint8)
    tensor[LARGE_PAGE_BYTES] = 7
    before = int(mapping_of(tensor.data_ptr())["Rss"][0])
    assert prefault(tensor, 5, 3 * LARGE_PAGE_BYTES)
    assert int(mapping_of(tensor.data_ptr())["Rss"][0]) - before >= 2 * LARGE_PAGE_BYTES // 1024
    assert tensor[LARGE_PAGE_BYTES] == 7
    assert tensor.sum() == 7


def test_a_system_that_cannot_says_so() -> None:
    assert not prefault(torch.empty(0).as_strided((0,), (1,)), 0, 1 << 60)
