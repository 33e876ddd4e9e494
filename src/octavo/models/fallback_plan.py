"""Tensor parallelism of models that transformers' own code computes, by the library's plan for them.

A plan names, for linear layers, whether their outputs or their inputs are sharded. Attention has a part of the heads on
each rank; what no plan names is the same on every rank, experts too.

Legend: T = tokens, K = inputs of a layer, N = outputs.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear

_OUTPUTS, _INPUTS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")


class Plan:
    """The library's plan for `library`, a model of `size` ranks; one rank needs none."""

    def __init__(self, library: Any, model: str, size: int) -> None:
        self._model, self._size = model, size
        found: Mapping[str, str] = {} if size == 1 else getattr(library.config, "base_model_tp_plan", None) or {}
        prefix = f"{library.base_model_prefix}."
        self._styles = {
            re.compile(re.escape(prefix + name).replace(r"\*", r"\d+")): style
            for name, style in found.items()
            if style in (*_OUTPUTS, *_INPUTS)
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


class FallbackLinear(MergedLinear):
    """In the place of a `torch.nn.Linear`: inputs of any number of dimensions."""

    def __init__(self, original: nn.Linear, context: BuildContext, style: str | None = None) -> None:
        self._group, self._style = context.groups.tensor, style
        rank, size = self._group.rank, self._group.size
        inputs, outputs = Share.whole(original.in_features), Share.whole(original.out_features)
        if style in _INPUTS:
            inputs = Share.of(original.in_features, rank, size)
        if style in _OUTPUTS:
            outputs = Share.of(original.out_features, rank, size)
        self._sizes_of_ranks = [Share.of(original.out_features, each, size).size for each in range(size)]
        super().__init__(inputs, {"": outputs}, has_bias=original.bias is not None, context=context)
        self.in_features, self.out_features = original.in_features, original.out_features

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype, which some models look at: without values, as those are packed."""
        return torch.empty(self.out_features, self.in_features, dtype=self._context.dtype, device="meta")

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Apply to x [..., K], or this rank's part of K: [..., N], or this rank's part of N."""
        rows = x.reshape(-1, x.shape[-1])  # [T, K]
        if self._style == "rowwise_split_input":
            rows = rows[:, self.inputs.start : self.inputs.stop]
        out = super().forward(rows.contiguous(), adapter_ids)
        if self._style in _INPUTS:
            out = self._group.all_reduce(out)
        elif self._style == "colwise_gather_output":
            out = self._group.all_gather(out, self._sizes_of_ranks)
        return out.view(*x.shape[:-1], -1)
