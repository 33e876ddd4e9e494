"""A device whose queue records ops, for engines on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.end_to_end.conftest import one_checker  # noqa: F401 - for all tests here
from tests.worker.fixed_attention import FixedAttention

from octavo.device.base import DeviceQueue
from octavo.device.cpu import CpuKind
from octavo.device.manager import DeviceManager
from octavo.layers.table_in_file import TableInFile


class Place:
    """Where the engine of a test finds its queue, and its model."""

    def __init__(self) -> None:
        self.queue: DeviceQueue | None = None
        self.model = "demo"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    here = Place()

    def attention(self: DeviceManager, dtype: torch.dtype, **options: Any) -> FixedAttention:
        return FixedAttention(self.kernels(dtype), dtype)

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", "torch")  # the double records torch's ops, and none that we call ourselves
    monkeypatch.setattr(CpuKind, "queue", lambda kind: here.queue)
    monkeypatch.setattr(DeviceManager, "attention", attention)
    monkeypatch.setattr(TableInFile, "from_mapped", lambda table: None)  # a device's tables are in its own memory
    return here
