"""While a model loads: a terminal shows how far it is, and the system reads ahead of it."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.models.tiny import TINY_MODELS

from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.device.manager import DeviceManager
from octavo.layers.context import BuildContext
from octavo.loader import base, read_ahead
from octavo.loader.read_ahead import ReadAhead
from octavo.loader.registry import get_model_loader


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_shows_how_far_loading_is(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(case for case in TINY_MODELS if case.name == "qwen3").save(tmp_path)
    devices = DeviceManager("cpu")
    context = BuildContext(
        kernels=devices.kernels(torch.float32, frozenset({None})),
        attention=devices.attention(torch.float32),
        dtype=torch.float32,
        device=devices.device,
    )
    monkeypatch.setattr(base, "_BAR_AFTER_S", 0.0)
    terminal = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    model_config = read_model_config(tmp_path, model="tiny", dtype="float32")
    loader = get_model_loader(LoadConfig(load_format="auto", seed=0, packed_cache_bytes=0))
    loader.load_model(model_config, context)
    assert ("Weights:   0%" in terminal.getvalue()) is is_terminal
    assert bool(terminal.getvalue()) is is_terminal


def test_the_system_reads_a_window_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(read_ahead, "_PIECE_BYTES", 10)
    monkeypatch.setattr(read_ahead, "_WINDOW_BYTES", 20)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: asked.append((start, size)))
    for name, size in (("first", 25), ("second", 12)):
        (tmp_path / name).write_bytes(bytes(size))
    ahead = ReadAhead([tmp_path / "first", tmp_path / "second"])
    assert asked == [(0, 10), (10, 10)]
    ahead.used(3)
    assert asked[2:] == [(20, 10)]  # 22 bytes: the file has 25
    ahead.used(25)
    assert asked[3:] == [(0, 10), (10, 10)]
    ahead.used(9)
    assert len(asked) == 5
