"""`BuildContext`: passed to every layer at construction, so that layers need no globals."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from octavo.attention.base import AttentionBackend
from octavo.config.parallel import Stage
from octavo.distributed.groups import ParallelGroups
from octavo.errors import UnsupportedModelError
from octavo.kernels.reference import Kernels
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import QuantizedAtLoad, Schemes, WeightScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Where a model lives and which kernels compute it; and which part of the model is being built."""

    kernels: Kernels
    attention: AttentionBackend[Any]  # `Any`: the type of its plan is private
    dtype: torch.dtype  # of weights and activations
    device: torch.device
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    stage: Stage | None = None  # of a pipeline; None: all layers
    schemes: Schemes = field(default_factory=QuantizedAtLoad)  # of linear layers
    aux_layers: tuple[int, ...] = ()  # ascending: layers whose inputs a stage also hands out
    checkpoint_names: Mapping[str, str] = field(default_factory=dict)  # by path in the model, as in `CausalLM`
    path: str = ""  # of this part within the model

    def at(self, part: str) -> Self:
        return replace(self, path=f"{self.path}.{part}" if self.path else part)

    def name_of(self, part: str) -> str:
        """Return the checkpoint's name of the layer being built, or of one part of a merged one."""
        numbers = [step for step in self.path.split(".") if step.isdigit()]
        template = self.path + f":{part}" * bool(part)
        for number, brace in zip(numbers, ("{layer}", "{expert}"), strict=False):
            template = template.replace(f".{number}.", f".{brace}.", 1)
        name = self.checkpoint_names.get(template, template)
        return name.format(**dict(zip(("layer", "expert"), numbers, strict=False)))

    def scheme(self, parts: Iterable[str], role: LinearRole) -> WeightScheme:
        """Return the scheme of the linear layer being built, merged from some parts."""
        names = [self.name_of(part) for part in parts]
        schemes = [self.schemes.scheme_of(name, role) for name in names]
        for scheme in schemes:
            if (merged := scheme.merged(schemes)) is not None:
                return merged
        other = next(index for index, scheme in enumerate(schemes) if scheme != schemes[0])
        found = f"{names[0]} has {schemes[0].name}, {names[other]} has {schemes[other].name}"
        raise UnsupportedModelError(f"weights of layers that are computed as one must have one form: {found}")
