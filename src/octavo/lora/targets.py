"""Where adapters go in a model: modules of the checkpoint to parts of its layers, on one rank."""

from collections.abc import Iterator, Set
from dataclasses import dataclass

from octavo.errors import AdapterError
from octavo.layers.linear import MergedLinear
from octavo.layers.moe import LinearElsewhere
from octavo.layers.vocabulary import Embedding
from octavo.models.interfaces import CausalLM
from octavo.models.weights import OtherStages, find_part, numbers_in, renamed

AdaptedLayer = MergedLinear | Embedding


@dataclass(frozen=True, slots=True)
class Target:
    """A module of the checkpoint in the model: one part of a layer."""

    path: str  # of the layer, within the model
    layer: AdaptedLayer
    part: str  # a key of `MergedLinear.parts`


class AdapterTargets:
    """The modules of one rank that adapters can change, by their names in the checkpoint; with `experts`, theirs, too.

    None: the module is on another rank.
    """

    def __init__(self, model: CausalLM, *, experts: bool = False) -> None:
        self._model, self._elsewhere, self._has_experts = model, OtherStages(model), experts
        self._by_module = dict(_targets(model, model.adapted_layers | (model.adapted_experts if experts else set())))

    @property
    def layers(self) -> dict[str, AdaptedLayer]:
        """The layers, by their paths in the model."""
        return {target.path: target.layer for target in self._by_module.values() if target is not None}

    def find(self, module: str) -> Target | None:
        """Return the place of a module; None: it is on another rank.

        Raises:
            AdapterError: the model has no such module, or none that adapters can change.
        """
        name = renamed(self._model, module)
        if name in self._by_module:
            return self._by_module[name]
        if f"{name}.weight" in self._elsewhere:
            return None
        if not self._has_experts and name in dict(_targets(self._model, self._model.adapted_experts)):
            raise AdapterError(f"{module} is part of an expert: set lora_experts to serve adapters of experts")
        known = ", ".join(sorted({module.rpartition(".")[2] for module in self._by_module}))
        architecture = self._model.config.architecture
        raise AdapterError(f"{module} is no module of {architecture} that adapters can change; known: {known}")


def _targets(model: CausalLM, paths: Set[str]) -> Iterator[tuple[str, Target | None]]:
    for template, target in model.weight_names.items():
        path_template, _, part = target.partition(":")
        if path_template not in paths or target in model.parts_on_other_ranks:
            continue
        for numbers in numbers_in(template, model.stage.layers, model.num_experts):
            path = path_template.format(**numbers)
            layer = find_part(model, path)
            if isinstance(layer, LinearElsewhere):
                yield template.format(**numbers), None
            elif isinstance(layer, Embedding) or (isinstance(layer, MergedLinear) and part in layer.parts):
                yield template.format(**numbers), Target(path, layer, part)
