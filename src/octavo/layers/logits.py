"""From hidden states to logits. Legend: L = rows that get logits, D = hidden size, V = vocabulary."""

from collections.abc import Mapping

import torch

from octavo.distributed.shares import Share
from octavo.layers.adapted_vocabulary import LogitsAdapter, rows_by_adapter
from octavo.layers.context import BuildContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.base import TensorSpec

# Rows at a time: limits temporaries to 128 * V values (39 MB in bf16 for V = 151,936).
_SLICE_ROWS = 128


class LogitsHead(MergedLinear):
    """The last linear layer. If tied, it shares the embedding's weights and has none in the checkpoint.

    Each rank computes a range of the vocabulary; logits are all-gathered, so that all ranks sample alike.
    """

    role = "logits"

    def __init__(self, hidden_size: int, vocab_size: int, *, tied_to: Embedding | None, context: BuildContext) -> None:
        self._group = context.groups.tensor
        ranges = [Share.of_features(vocab_size, rank, self._group.size) for rank in range(self._group.size)]
        parts = {"": ranges[self._group.rank]}
        super().__init__(Share.whole(hidden_size), parts, has_bias=False, context=context)
        self._tied_to, self._vocab_size = tied_to, vocab_size
        self._sizes = [ids.size for ids in ranges]  # per rank
        self.slots: dict[int, LogitsAdapter] = {}  # of adapters that change this layer

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {} if self._tied_to is not None else super().checkpoint_tensors()

    @property
    def num_weights(self) -> int:
        return 0 if self._tied_to is not None else super().num_weights

    @property
    def num_bytes(self) -> int:
        return 0 if self._tied_to is not None else super().num_bytes

    def process_weights_after_loading(self) -> None:
        if self._tied_to is None:
            super().process_weights_after_loading()
        elif self._packed is None:
            self._packed = self._tied_to.packed

    @property
    def _is_shared(self) -> bool:
        """Whether the embedding owns this head's packed weight."""
        return self._tied_to is not None and self._tied_to.is_packed

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        return {} if self._is_shared else super().packed_tensors()

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._is_shared:
            self.process_weights_after_loading()
        else:
            super().adopt_packed(tensors)

    def forward(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits [L, V] of hidden [L, D], always float32."""
        if hidden.shape[0] <= _SLICE_ROWS:
            return self._forward_slice(hidden, adapter_ids)
        logits = hidden.new_empty(hidden.shape[0], self._vocab_size, dtype=torch.float32)
        for start in range(0, len(hidden), _SLICE_ROWS):
            rows = slice(start, start + _SLICE_ROWS)
            logits[rows] = self._forward_slice(hidden[rows], None if adapter_ids is None else adapter_ids[rows])
        return logits

    def argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each row of hidden [L, D], [L] float32, and the lowest id that has it, [L]."""
        if self._group.size > 1 or any(rows_by_adapter(self.slots, adapter_ids)):
            values, ids = self(hidden, adapter_ids).max(-1)
            return values, ids
        kernels, hidden = self._context.kernels, self.selected(hidden)
        if hidden.shape[0] <= _SLICE_ROWS:
            return kernels.logits_argmax(hidden, self.packed)
        parts = [kernels.logits_argmax(rows, self.packed) for rows in torch.split(hidden, _SLICE_ROWS)]
        return torch.cat([values for values, _ in parts]), torch.cat([ids for _, ids in parts])

    def _forward_slice(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        kernels = self._context.kernels
        logits = kernels.logits_linear(self.selected(hidden), self.packed)
        for rows, adapter in rows_by_adapter(self.slots, adapter_ids):
            logits[rows] = adapter.logits(hidden[rows], logits[rows], kernels)
        return self._group.all_gather(logits, self._sizes)
