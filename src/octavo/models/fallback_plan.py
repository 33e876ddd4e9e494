"""Tensor parallelism of models that transformers' own code computes, by the library's plan for them.

A plan names, for linear layers, whether their outputs or their inputs are sharded. Attention has a part of the heads on
each rank; what no plan names is the same on every rank, experts too.
"""

import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.models.fallback_layers import INPUTS, OUTPUTS


class Plan:
    """The library's plan for `library`, a model of `size` ranks; one rank needs none."""

    def __init__(self, library: Any, model: str, size: int) -> None:
        self._model, self._size = model, size
        found: Mapping[str, str] = {} if size == 1 else getattr(library.config, "base_model_tp_plan", None) or {}
        prefix = f"{library.base_model_prefix}."
        self._styles = {
            re.compile(re.escape(prefix + name).replace(r"\*", r"\d+")): style
            for name, style in found.items()
            if style in (*OUTPUTS, *INPUTS)
        }
        if size > 1:
            self._check(library)

    def style_of(self, name: str) -> str | None:
        """Return how a linear layer is sharded; None: it is not."""
        return next((style for pattern, style in self._styles.items() if pattern.fullmatch(name)), None)

    def _check(self, library: Any) -> None:
        """Raise UnsupportedModelError if attention would have other heads than a rank's."""
        if not self._styles:
            raise self._unsupported(f"transformers has no plan for {type(library).__name__}")
        for name, module in library.named_modules():
            if getattr(module, "layer_idx", None) is None or not hasattr(module, "is_causal"):
                continue
            for part, inner in module.named_modules():
                has_matrix = any(parameter.dim() > 1 for parameter in inner.parameters(recurse=False))
                if has_matrix and self.style_of(f"{name}.{part}") not in ("colwise", "rowwise"):
                    raise self._unsupported(f"transformers has no plan that divides the heads of {name} ({part})")

    def _unsupported(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._model}: tensor_parallel_size={self._size}: {why}")

    def check_divides(self, what: str, number: int) -> None:
        """Raise UnsupportedModelError if ranks would not have equal parts."""
        if number % self._size:
            why = f"must divide the {what} ({number}) of a model that transformers' own code computes"
            raise UnsupportedModelError(f"{self._model}: tensor_parallel_size={self._size} {why}")
