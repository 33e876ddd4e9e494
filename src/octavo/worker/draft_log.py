"""Logs of drafts: what they had as inputs of recurrent layers, which need them again if they are accepted.

A state cannot be rolled back, so none after a draft is ever kept. A row's next step begins from the state before them,
and computes those that were accepted once more, in these layers alone: the bits are the same, and a state is read and
written once per step. `LoggedDrafts` counts them.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from octavo.attention.metadata import LayerCache
from octavo.config.engine import EngineConfig
from octavo.config.layers import Mixer, RecurrentSpec
from octavo.config.model import ModelConfig
from octavo.kernels.states import StateTensors


def log_shape(config: EngineConfig, mixer: Mixer, num_rows: int) -> tuple[int, int, int] | None:
    """Return the shape of a mixer's log of drafts; None: it has none."""
    if config.speculative is None or not isinstance(mixer, RecurrentSpec):
        return None
    return num_rows, config.speculative.num_speculative_tokens, mixer.input_size


def log_bytes(config: EngineConfig, part: ModelConfig, layers: Sequence[int], num_rows: int) -> int:
    """Return the memory of the logs of these layers of a rank's shard."""
    shapes = (log_shape(config, mixer, num_rows) for _, mixer in part.kept(layers))
    dtype_bytes: int = getattr(torch, part.dtype).itemsize
    return sum(prod(shape) for shape in shapes if shape is not None) * dtype_bytes


def with_logs(
    caches: Sequence[LayerCache], config: EngineConfig, part: ModelConfig, layers: Sequence[int], num_rows: int
) -> list[LayerCache]:
    """Return the caches of these layers with logs of drafts."""

    def with_log(cache: LayerCache, mixer: Mixer) -> LayerCache:
        shape = log_shape(config, mixer, num_rows)
        if shape is None:
            return cache
        assert isinstance(cache, StateTensors), "recurrent layers have states"
        return replace(cache, log=cache.conv.new_zeros(shape))

    return [with_log(cache, mixer) for cache, (_, mixer) in zip(caches, part.kept(layers), strict=True)]
