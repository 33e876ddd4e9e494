"""Logits processors on the device: penalties, bias, masks and bad words, as defined by `logits_processors.py` and
`grammar.py`.

Output tokens are counted on the device, so tokens that the host has not received yet are included.

Legend: L = logits rows of the step, V = vocabulary size, N = rows of the worker, C = maximum tokens of a context, M =
masks, W = words of a mask, B = biases, H = bad words of several tokens, K = tokens of the longest one minus 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import Int32Array, TokenMasks
from octavo.kernels.dispatch import uses_triton
from octavo.sampling.device_draw import SamplingMetadata
from octavo.sampling.logits_processor_params import LogitsProcessorParams, LongBadWords
from octavo.sampling.rows import SamplingRows

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The known tokens of each row: prompt and output."""

    token_ids: Tensor  # [N, .] int32
    rows: Tensor  # [L] int64 into token_ids
    num_tokens: Tensor  # [L] int64
    max_tokens: int  # C, the maximum of num_tokens or more


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsProcessorTensors:
    """Logits processors with parameter lists, over all rows of the step; scalar parameters are in
    `SamplingMetadata`.
    """

    masks: Tensor  # [M, W] int32; bit b of word w allows token 32 w + b
    biased: Tensor  # [B] int64: row * V + id, distinct except for biases of 0
    biases: Tensor  # [B] float32
    bad_rows: Tensor  # [H] int64, index into L
    bad_lens: Tensor  # [H] int64, number of tokens except the last
    bad_tokens: Tensor  # [H, K] int64
    banned: Tensor  # [H] int64: row * V + the last token

    @classmethod
    def of(cls, arrays: Arrays, send: Callable[..., list[Tensor]]) -> Self:
        """Copy `processor_arrays` to the device with `send`, which takes flat arrays."""
        names = [field.name for field in fields(cls)]
        tensors = send(*(arrays[name].reshape(-1) for name in names))
        return cls(**{name: x.view(arrays[name].shape) for name, x in zip(names, tensors, strict=True)})


def processor_arrays(
    rows: SamplingRows, row_ids: Int32Array, output_indices: NDArray[np.int64], masks: TokenMasks | None
) -> Arrays:
    """Return the arrays of `LogitsProcessorTensors` for the worker's rows `row_ids` [L], and `mask_indices` [L]."""
    of_grammar = {} if masks is None else dict(zip(masks.logits_rows.tolist(), masks.words, strict=True))
    words: list[NDArray[np.int32]] = []
    indices = np.full(len(row_ids), -1, dtype=np.int64)
    asking: list[tuple[int, LogitsProcessorParams]] = []
    has_processors = rows.records(row_ids)["has_processors"]
    for at, (row, index) in enumerate(zip(row_ids.tolist(), output_indices.tolist(), strict=True)):
        allowed = of_grammar.get(at)
        if has_processors[at]:
            asked = rows.processor_params_of(row)
            allowed = _both(asked.allowed_words(index), allowed)
            asking.append((at, asked))
        if allowed is not None:
            indices[at] = len(words)
            words.append(allowed)
    num_words = -(-rows.vocab_size // 32)
    return {
        "mask_indices": indices,
        "masks": np.stack([each[:num_words] for each in words]) if words else np.zeros((0, num_words), np.int32),
        "biased": _joined([at * rows.vocab_size + asked.biased_ids for at, asked in asking], np.int64),
        "biases": _joined([asked.biases for _, asked in asking], np.float32),
        **_bad_arrays([(at, asked.long_bad_words) for at, asked in asking], rows.vocab_size),
    }


def _both(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other[: len(one)]


def _bad_arrays(bad: list[tuple[int, LongBadWords]], vocab_size: int) -> Arrays:
    bad = [(at, words) for at, words in bad if len(words.lens)]
    longest = max((words.tokens.shape[1] for _, words in bad), default=0)
    padded = [np.pad(words.tokens, ((0, 0), (0, longest - words.tokens.shape[1]))) for _, words in bad]
    return {
        "bad_rows": _joined([np.full(len(words.lens), at) for at, words in bad], np.int64),
        "bad_lens": _joined([words.lens for _, words in bad], np.int64),
        "bad_tokens": np.concatenate(padded) if padded else np.zeros((0, 0), dtype=np.int64),
        "banned": _joined([at * vocab_size + words.last for at, words in bad], np.int64),
    }


def _joined(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype=dtype)


def process_logits_on_device(
    logits: Tensor, metadata: SamplingMetadata, context: Context, processors: LogitsProcessorTensors
) -> Tensor:
    """Return a copy of logits [L, V] float32 with all logits processors applied."""
    process_logits = _process_logits_by_triton if uses_triton(logits.device, logits.dtype) else process_logits_by_torch
    processed = process_logits(logits, metadata, context, processors.masks)
    flat = processed.view(-1)
    flat.scatter_add_(0, processors.biased, processors.biases)
    if len(processors.banned):
        flat.scatter_add_(0, processors.banned, _bans(context, processors))
    return processed


def _process_logits_by_triton(logits: Tensor, metadata: SamplingMetadata, context: Context, masks: Tensor) -> Tensor:
    from octavo.kernels.triton.logits import process_logits

    known = context.token_ids, context.rows, context.num_tokens, metadata.num_prompt_tokens
    penalties = metadata.repetition, metadata.presence, metadata.frequency
    return process_logits(logits, known, context.max_tokens, penalties, metadata.mask_indices, masks)


def process_logits_by_torch(logits: Tensor, metadata: SamplingMetadata, context: Context, masks: Tensor) -> Tensor:
    """Return a copy [L, V] with penalties and masks applied. The specification of the Triton kernel."""
    return _mask(_penalize(logits, metadata, context), metadata.mask_indices, masks)


def _penalize(logits: Tensor, metadata: SamplingMetadata, context: Context) -> Tensor:
    """Return a copy [L, V] with penalties applied, using torch ops."""
    token_ids = context.token_ids[:, : context.max_tokens].index_select(0, context.rows).to(torch.int64)  # [L, C]
    token_ids = token_ids.clamp(max=logits.shape[1] - 1)
    places = torch.arange(token_ids.shape[1], device=logits.device)
    is_known = places < context.num_tokens[:, None]  # [L, C]
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    seen = counts.scatter_add(1, token_ids, is_known.to(torch.int32))  # [L, V]
    is_output = is_known & (places >= metadata.num_prompt_tokens[:, None])
    said = counts.scatter_add_(1, token_ids, is_output.to(torch.int32))  # [L, V]
    factors = metadata.repetition[:, None].float()
    repeated = torch.where(logits < 0, logits * factors, logits / factors)
    less = (said.double() * metadata.frequency[:, None] + metadata.presence[:, None]).float()
    processed = torch.where(seen > 0, repeated, logits)
    return torch.where(said > 0, processed - less, processed)


def _mask(logits: Tensor, mask_indices: Tensor, masks: Tensor) -> Tensor:
    """Set logits [L, V] of tokens that masks do not allow to -inf, in place; return the logits."""
    if not len(masks):
        return logits
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    words = masks.index_select(0, mask_indices.clamp(min=0))[:, token_ids >> 5]  # [L, V]
    is_banned = ((words >> (token_ids & 31)) & 1) == 0
    return logits.masked_fill_(is_banned & (mask_indices >= 0)[:, None], -torch.inf)


def _bans(context: Context, processors: LogitsProcessorTensors) -> Tensor:
    """Return -inf for each bad word [H] whose other tokens are the latest ones of its row, else 0."""
    places = torch.arange(processors.bad_tokens.shape[1], device=processors.banned.device)  # [K]
    starts = context.num_tokens[processors.bad_rows] - processors.bad_lens  # [H]
    at = (starts[:, None] + places).clamp(0, context.token_ids.shape[1] - 1)  # [H, K]
    known = context.token_ids[context.rows[processors.bad_rows][:, None], at]
    is_same = (known == processors.bad_tokens) | (places >= processors.bad_lens[:, None])
    is_complete = is_same.all(-1) & (starts >= 0)
    return torch.where(is_complete, -torch.inf, 0.0).to(torch.float32)
