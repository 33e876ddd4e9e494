"""Logits processors of one row. Most rows need none and have no `RowLogitsProcessors`.

Legend: V = vocabulary size, N = token ids in a list.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.contracts.schedule import Int32Array
from octavo.sampling.penalties import OutputPenalty, RepetitionPenalty
from octavo.sampling_params import SamplingParams


class RowLogitsProcessors:
    """The logits processors of one row, in order: penalties, bias, allowed ids, bad words, min_tokens."""

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        token_ids: Int32Array,
        num_prompt_tokens: int,
        device: torch.device,
    ) -> None:
        self._penalties: list[RepetitionPenalty | OutputPenalty] = []
        if params.repetition_penalty != 1.0:
            self._penalties.append(RepetitionPenalty(params, token_ids))
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._penalties.append(OutputPenalty(params, token_ids[num_prompt_tokens:]))
        self._bias = _bias_columns(params, device)
        self._allowed = _ids_tensor(params.allowed_token_ids, device)
        long = [word for word in bad_words_token_ids if len(word) > 1]
        self._banned = _ids_tensor([word[0] for word in bad_words_token_ids if len(word) == 1], device)
        self._bad_words = BadWords(long, token_ids) if long else None
        self._stop_token_ids = _ids_tensor(stop_token_ids if params.min_tokens else None, device)
        self._min_tokens = params.min_tokens

    @staticmethod
    def are_needed(params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]]) -> bool:
        """Return whether these parameters change any logits."""
        return params.changes_logits or bool(bad_words_token_ids)

    def append(self, token_id: int) -> None:
        """Record an output token."""
        for penalty in self._penalties:
            penalty.append(token_id)
        if self._bad_words is not None:
            self._bad_words.append(token_id)

    def apply(self, logits: Tensor, output_index: int, drafts: Sequence[int] = ()) -> None:
        """Edit `logits` [V] in place, for output token number `output_index`, after `drafts` if any."""
        for penalty in self._penalties:
            penalty.apply(logits, drafts)
        if self._bias is not None:
            logits[self._bias[0]] += self._bias[1]
        if self._allowed is not None:
            allowed = logits[self._allowed]
            logits.fill_(-torch.inf)[self._allowed] = allowed
        if self._banned is not None:
            logits[self._banned] = -torch.inf
        if self._bad_words is not None and (banned := self._bad_words.banned(drafts)):
            logits[banned] = -torch.inf
        if self._stop_token_ids is not None and output_index < self._min_tokens:
            logits[self._stop_token_ids] = -torch.inf


class BadWords:
    """Bans the last token of every bad word whose other tokens are the latest ones, prompt included.

    Words are found by these tokens: the cost of a token grows with the number of different lengths, not of words.
    """

    def __init__(self, words: Sequence[Sequence[int]], token_ids: Int32Array) -> None:
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # last tokens by the others
        for word in words:
            self._ends[tuple(word[:-1])].append(word[-1])
        self._sizes = sorted({len(others) for others in self._ends})
        longest = self._sizes[-1]
        self._tail = deque[int](token_ids[max(0, len(token_ids) - longest) :].tolist(), maxlen=longest)

    def append(self, token_id: int) -> None:
        """Record an output token."""
        self._tail.append(token_id)

    def banned(self, drafts: Sequence[int] = ()) -> list[int]:
        """Return the ids that would complete a bad word now, after `drafts` if any."""
        tail = (*self._tail, *drafts)
        sizes = [size for size in self._sizes if size <= len(tail)]
        return [end for size in sizes for end in self._ends.get(tail[len(tail) - size :], ())]


def _bias_columns(params: SamplingParams, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not params.logit_bias:
        return None
    token_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)  # [N]
    return token_ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)  # [N]


def _ids_tensor(token_ids: Sequence[int] | None, device: torch.device) -> Tensor | None:
    return torch.tensor(list(dict.fromkeys(token_ids)), dtype=torch.int64, device=device) if token_ids else None
