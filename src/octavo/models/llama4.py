"""Llama 4: a mixture whose weights are on the experts' inputs, and how its checkpoints hold it.

Checkpoints have the experts of a layer as stacks of transposed matrices: [experts, D, 2 * I], gates first, and
[experts, I, D].

Legend: T = tokens, D = hidden size, I = intermediate size, C = experts per token, the shared one included.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from octavo.config.layers import ExpertsSpec
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.layers.moe import MixtureOfExperts
from octavo.layers.norm import RMSNorm
from octavo.models.interfaces import CausalLM

_STACK = re.compile(r"(?P<experts>model\.layers\.\d+\.feed_forward\.experts)\.(?P<linear>gate_up|down)_proj(\.weight)?")


class InputWeightedMoE(MixtureOfExperts):
    """Each chosen expert computes the token times its weight; their outputs are added up."""

    is_recordable = False  # op by op

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels = self._kernels
        normed, total = norm.add(x, residual)
        routes = kernels.route(normed, self.router.packed, self._routing)
        self.count(routes)
        num_tokens, num_choices = routes.weights.shape
        weighted = (normed.unsqueeze(1).float() * routes.weights.unsqueeze(2)).to(normed.dtype)  # [T, C, D]
        numbers = torch.arange(num_tokens * num_choices, device=x.device)
        pairs = weighted.flatten(0, 1), numbers, routes.expert_ids.flatten(), self.packed, self._activation
        adapters = self.adapters_of(None if adapter_ids is None else adapter_ids.repeat_interleave(num_choices))
        rows = kernels.expert_rows(*pairs) if adapters is None else kernels.adapted_expert_rows(*pairs, adapters)
        out = kernels.combine_experts(rows.view_as(weighted), torch.ones_like(routes.weights))
        return self._group.all_reduce(out), total


class Llama4ForCausalLM(CausalLM):
    """The table of names has the experts one by one, as GGUF files have them."""

    def build_feed_forward(self, layer: int) -> nn.Module:
        spec = self.config.layers[layer].feed_forward
        if not isinstance(spec, ExpertsSpec):
            return super().build_feed_forward(layer)
        if self.context.groups.experts.size > 1:
            raise UnsupportedModelError(f"{self.config.model}: expert_parallel does not compute experts of this kind")
        return InputWeightedMoE(layer, self.config.hidden_size, spec, self.activation, context=self.context)

    def laid_out(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the experts' tensors one by one, gates apart from ups, as [N, K]."""
        for name, tensor in tensors:
            found = _STACK.fullmatch(name)
            if found is None:
                yield name, tensor
                continue
            if tensor.dim() != 3 or len(tensor) != self.num_experts:
                why = f"a stack of {self.num_experts} experts is expected, found {list(tensor.shape)}"
                raise CheckpointError(f"{self.config.path}: tensor {name!r}: {why}")
            for number, stack in enumerate(tensor):
                expert = f"{found['experts']}.{number}"
                if found["linear"] == "down":
                    yield f"{expert}.down_proj.weight", stack.T
                else:
                    for part, rows in zip(("gate", "up"), stack.T.chunk(2), strict=True):
                        yield f"{expert}.{part}_proj.weight", rows
