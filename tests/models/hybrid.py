"""Hybrids of transformers' as checkpoints, with states kept more often than by default."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from octavo.config import args
from octavo.config.hf import read_model_config
from octavo.config.layers import LayerSpec, RecurrentSpec
from octavo.config.model import ModelConfig

INTERVAL = 8  # tokens between states that are kept


def keep_states_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a state after each `INTERVAL` tokens in engines that are made from now on."""

    def often(layer: LayerSpec) -> LayerSpec:
        mixer, beside = (
            structs.replace(each, interval=INTERVAL) if isinstance(each, RecurrentSpec) else each
            for each in (layer.mixer, layer.beside)
        )
        return replace(layer, mixer=mixer, beside=beside)

    def read(*arguments: Any, **options: Any) -> ModelConfig:
        config = read_model_config(*arguments, **options)
        return replace(config, layers=tuple(map(often, config.layers)))

    monkeypatch.setattr(args, "read_model_config", read)
