"""`BuildContext`: what every layer is given when it is built, so that no layer has to look anything up."""

from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.config.parallel import Stage
from octavo.distributed.groups import ParallelGroups
from octavo.kernels.reference import Kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Where a model lives and what computes it."""

    kernels: Kernels
    attention: AttentionBackend[Any]  # its plan is its own business
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    stage: Stage | None = None  # of a pipeline; None: all layers
