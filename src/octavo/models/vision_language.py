"""Shared by language models with a vision tower: a decoder whose first stage has the tower, with its own weight names.

They differ in the decoder and in the tower: see `qwen2_vl`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from octavo.config.model import ModelConfig
from octavo.errors import UnsupportedModelError
from octavo.layers.context import BuildContext
from octavo.models.common import DecoderForCausalLM
from octavo.models.vision_tower import VisionTower


class VisionLanguageModel(DecoderForCausalLM):
    """A mixin for a decoder."""

    tower: ClassVar[type[VisionTower]]

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        assert config.vision is not None, f"{config.architecture} has a vision tower"
        self._check_stage(len(config.vision.deepstack_layers))
        if self.stage.is_first:
            self.vision = self.tower(config.vision, self.context)

    def _check_stage(self, num_deepstack: int) -> None:
        """Check that the layers that read the tower's output are those of the first stage, and not the model's last.

        Raises:
            UnsupportedModelError: they are not.
        """
        last = self.stage.layers.stop - self.stage.is_last
        if self.stage.is_first and num_deepstack > last:
            raise UnsupportedModelError(
                f"{self.config.path}: deepstack_visual_indexes: {num_deepstack} decoder layers read the vision tower's "
                f"output, but the first pipeline stage has {last} that can"
            )

    @property
    def encoder(self) -> VisionTower | None:
        """See `CausalLM.encoder`."""
        return self.vision if self.stage.is_first else None

    @cached_property
    def _tower_names(self) -> dict[str, str]:
        assert self.config.vision is not None
        names = self.tower.weight_names(self.config.vision)
        return {name: f"vision.{target}" for name, target in names.items()}

    @property
    def weight_targets(self) -> Mapping[str, str]:
        """See `CausalLM.weight_targets`."""
        return {**super().weight_targets, **self._tower_names}

    def ignores_weight(self, name: str) -> bool:
        """See `CausalLM.ignores_weight`."""
        assert self.config.vision is not None
        return super().ignores_weight(name) or name.startswith(self.tower.ignored_weights(self.config.vision))

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        """See `CausalLM.parts_on_other_ranks`."""
        others = super().parts_on_other_ranks
        return others if self.stage.is_first else others | frozenset(self._tower_names.values())

    @property
    def split_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """See `CausalLM.split_tensors`: towers have queries, keys and values in one tensor."""
        names = (name.removesuffix(".q") for name in self._tower_names if name.endswith(".qkv.q"))
        return {
            f"{name}.{suffix}": tuple(f"{name}.{part}.{suffix}" for part in "qkv")
            for name in names
            for suffix in ("weight", "bias")
        }
