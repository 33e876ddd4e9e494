"""A Llama that reads a step's extra inputs: adapters, embeddings, and rows, for per-request state.

Tests put it in the place of the family's class.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache
from octavo.models.interfaces import CausalLM, IntermediateTensors

_NUM_ROWS = 16


class LlamaForCausalLM(CausalLM):
    has_state: ClassVar[bool] = True  # each token's embedding is a running mean over the request

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        size = self.config.hidden_size
        self._adapters = torch.randn(3, size, generator=torch.Generator().manual_seed(0))  # the last one is none
        self._adapters[-1] = 0
        self._states = torch.full((_NUM_ROWS, size), torch.nan)  # [N, D], of the last request in each row

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = super().embed(batch)
        if not self.has_state:
            return x
        assert batch.rows is not None
        x, ends = x.clone(), batch.query_start_loc_list
        for at, row in enumerate(batch.rows.tolist()):
            is_first = batch.seq_lens_list[at] == ends[at + 1] - ends[at]
            state = torch.zeros_like(self._states[row]) if is_first else self._states[row]
            for token in range(ends[at], ends[at + 1]):
                state = (state + x[token].float()) / 2
                x[token] = state.to(x.dtype)
            self._states[row] = state
        return x

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: Sequence[LayerCache], step: AttentionMetadata
    ) -> IntermediateTensors:
        """Recorded without adapters; a step that has some must not be a replay."""
        if step.batch.adapter_ids is not None and self.stage.is_first:
            x = x + self._adapters[step.batch.adapter_ids].to(x.dtype)
        return super().run_layers(x, residual, kv_caches, step)
