"""`DraftHead`: a decoder layer that drafts from a model's hidden states, as the worker sees it.

Entry p of a head's context is token p + 1 and the model's hidden state of position p; for tokens that are drafts, the
head's own output takes its place. A head computes like the last stage of a pipeline: what enters its layer is computed
before, op by op.

Legend: T = tokens, D = hidden size, F = size of the model's states.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.models.interfaces import CausalLM, IntermediateTensors


class DraftHead(CausalLM, ABC):
    """What heads have in common. `run_layers` returns the next entry's hidden state as the residual stream."""

    @property
    @abstractmethod
    def num_features(self) -> int:
        """F, the elements of the model's states at a position."""

    @abstractmethod
    def states(self, computed: IntermediateTensors) -> Sequence[torch.Tensor]:
        """Return what the head reads of a step's output, [T, .] each: side by side, they are its states [T, F]."""

    @abstractmethod
    def reduce(self, states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, D] of a model's states [T, F]."""

    @abstractmethod
    def inputs(self, ids: torch.Tensor, hidden: torch.Tensor) -> IntermediateTensors:
        """Return what enters the layer for token ids [T] and hidden states [T, D]."""

    @abstractmethod
    def share(self, target: CausalLM) -> None:
        """Use parts of the model that the head drafts for, where it has none of its own."""

    def learn(self, token_ids: NDArray[np.int32]) -> None:
        """Hook for heads that learn from the tokens [T] that the model samples."""

    @property
    def bytes_in_file(self) -> int:
        return 0
