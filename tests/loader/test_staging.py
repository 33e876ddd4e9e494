"""Tensors that go through parts of host memory arrive as they were."""

import pytest
import torch

from octavo.loader import base
from octavo.loader.base import staged


def test_tensors_arrive_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_PART_BYTES", 64)
    sizes: list[int] = []

    def host_bytes(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    tensors = {
        "matrix": torch.randn(7, 9).to(torch.bfloat16),  # 126 bytes: two parts
        "vector": torch.randn(5),
        "strided": torch.randn(4, 6).T,
    }
    found = dict(staged(iter(tensors.items()), torch.device("cpu"), host_bytes))
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(found[name].data_ptr() != tensors[name].data_ptr() for name in ("matrix", "vector"))
    assert sizes == [64, 64, 64]


def test_what_is_there_already_stays() -> None:
    tensor = torch.empty(3, device="meta")
    ((_, found),) = staged(iter([("x", tensor)]), tensor.device)
    assert found is tensor
