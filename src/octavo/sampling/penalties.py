"""Penalties on tokens that occurred before.

Only tokens that occurred have counts, so a row with 1,000 output tokens stores at most 1,000 of them instead of one per
id of the vocabulary.

Legend: V = vocabulary size, N = distinct tokens seen.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.contracts.schedule import Int32Array
from octavo.sampling_params import SamplingParams


class TokenCounts:
    """Occurrences of each token, as two growing columns."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # token id -> index in the columns
        self._token_ids = np.zeros(64, dtype=np.int64)  # [capacity]
        self._counts = np.zeros(64, dtype=np.int64)  # [capacity]

    def add(self, token_id: int, count: int = 1) -> None:
        """Add occurrences of `token_id`."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[slot] = token_id
        self._counts[slot] += count

    def add_all(self, token_ids: Int32Array) -> None:
        """Add one occurrence of each of `token_ids` [N]."""
        distinct, counts = np.unique(token_ids, return_counts=True)
        for token_id, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self.add(token_id, count)

    def columns(self, device: torch.device, drafts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return the distinct token ids and how often each occurred, `drafts` included: two int64 [N]."""
        for token_id in drafts:
            self.add(token_id)
        num_seen = len(self._slots)
        columns = torch.from_numpy(np.stack([self._token_ids[:num_seen], self._counts[:num_seen]])).to(device)
        for token_id in reversed(drafts):
            self._take_back(token_id)
        return columns[0], columns[1]

    def _take_back(self, token_id: int) -> None:
        """Undo the latest `add`."""
        slot = self._slots[token_id]
        self._counts[slot] -= 1
        if not self._counts[slot]:
            del self._slots[token_id]


class RepetitionPenalty:
    """Makes tokens of prompt and output less likely: divides positive logits and multiplies negative ones.

    Source: Keskar et al., "CTRL", 2019, section 4.1; negative logits as in Hugging Face transformers.
    """

    def __init__(self, params: SamplingParams, token_ids: Int32Array) -> None:
        self._penalty = params.repetition_penalty
        self._seen = TokenCounts()
        self._seen.add_all(token_ids)

    def append(self, token_id: int) -> None:
        """Record an output token."""
        self._seen.add(token_id)

    def apply(self, logits: Tensor, drafts: Sequence[int] = ()) -> None:
        """Edit `logits` [V] in place, as if `drafts` were known."""
        token_ids, _ = self._seen.columns(logits.device, drafts)
        seen = logits[token_ids]  # [N]
        logits[token_ids] = torch.where(seen < 0, seen * self._penalty, seen / self._penalty)


class OutputPenalty:
    """Subtracts `frequency_penalty` per occurrence in the output and `presence_penalty` once (OpenAI's API)."""

    def __init__(self, params: SamplingParams, output_token_ids: Int32Array) -> None:
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._said = TokenCounts()
        self._said.add_all(output_token_ids)

    def append(self, token_id: int) -> None:
        """Record an output token."""
        self._said.add(token_id)

    def apply(self, logits: Tensor, drafts: Sequence[int] = ()) -> None:
        """Edit `logits` [V] in place, as if `drafts` were known."""
        token_ids, counts = self._said.columns(logits.device, drafts)
        logits[token_ids] -= (counts.double() * self._frequency + self._presence).float()
