"""Logits processors: penalties, logit bias, bad words of several tokens, and masks: of `allowed_token_ids`, other bad
words, `min_tokens`, and those that come with a step.

Nothing is kept between steps: tokens are counted in the rows' contexts where the logits are, including those that the
host has not received yet, so no state can go stale.

Legend: L = rows of logits, V = vocabulary size, N = rows of the worker, C = maximum tokens of a context, M = masks, W =
words of a mask, B = biases, H = bad words of several tokens, K = tokens of the longest one minus 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import Int32Array
from octavo.kernels.dispatch import uses_triton
from octavo.sampling.draw import SamplingMetadata
from octavo.sampling_params import SamplingParams

Arrays = dict[str, NDArray[np.generic]]


class LogitsProcessorParams:
    """The logits processors of one row, except penalties. Immutable: steps copy its arrays as they are."""

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        self._params, self._stop_token_ids, self._vocab_size = params, list(stop_token_ids), vocab_size
        biases = params.logit_bias or {}
        self.biased: NDArray[np.int64] = np.array(list(biases), dtype=np.int64)  # [B]
        self.biases: NDArray[np.float32] = np.array(list(biases.values()), dtype=np.float32)  # [B]
        long = [word for word in bad_words_token_ids if len(word) > 1]
        self.bad_lens: NDArray[np.int64] = np.array([len(word) - 1 for word in long], dtype=np.int64)  # [H]
        self.bad_tokens = np.zeros((len(long), self.bad_lens.max(initial=0)), dtype=np.int64)  # [H, K], padded
        for row, word in zip(self.bad_tokens, long, strict=True):
            row[: len(word) - 1] = word[:-1]
        self.banned: NDArray[np.int64] = np.array([word[-1] for word in long], dtype=np.int64)  # [H]
        self._always_banned = [word[0] for word in bad_words_token_ids if len(word) == 1]
        self._masks: dict[bool, Int32Array | None] = {}  # by whether `min_tokens` is not reached yet

    def mask(self, output_index: int) -> Int32Array | None:
        """Return the allowed tokens for output `output_index` as bits [W]; None: all are allowed."""
        is_early = output_index < self._params.min_tokens
        if is_early not in self._masks:
            self._masks[is_early] = self._make_mask([*self._always_banned, *(self._stop_token_ids if is_early else ())])
        return self._masks[is_early]

    def _make_mask(self, banned: list[int]) -> Int32Array | None:
        allowed = self._params.allowed_token_ids
        if allowed is None and not banned:
            return None
        bits = np.full(-(-self._vocab_size // 32) * 32, allowed is None)
        bits[list(allowed or ())] = True
        bits[banned] = False
        words: Int32Array = np.packbits(bits, bitorder="little").view(np.int32)
        return words


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The known tokens of each row: prompt, output and tokens to verify. Every row has at least one."""

    token_ids: Tensor  # [N, .] int32
    rows: Tensor  # [L] int64 into token_ids
    num_tokens: Tensor  # [L] int64
    max_tokens: int  # C, the maximum of num_tokens or more
    has_penalties: bool = True  # False: no row has any


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsProcessorTensors:
    """Logits processors with parameter lists, over all rows; scalar parameters are in `SamplingMetadata`."""

    masks: Tensor  # [M, W] int32; bit b of word w allows token 32 w + b
    biased: Tensor  # [B] int64: row * V + id, distinct except for biases of 0
    biases: Tensor  # [B] float32
    bad_rows: Tensor  # [H] int64, index into L
    bad_lens: Tensor  # [H] int64, number of tokens except the last
    bad_tokens: Tensor  # [H, K] int64
    banned: Tensor  # [H] int64: row * V + the last token

    @classmethod
    def on_device(cls, arrays: Arrays, send: Callable[..., list[Tensor]]) -> Self:
        """Copy `processor_arrays` to the device with `send`, which takes flat arrays."""
        names = [field.name for field in fields(cls)]
        tensors = send(*(arrays[name].reshape(-1) for name in names))
        return cls(**{name: x.view(arrays[name].shape) for name, x in zip(names, tensors, strict=True)})


def processor_arrays(
    processors: Sequence[LogitsProcessorParams | None],
    output_indices: NDArray[np.int64],
    masks: Sequence[Int32Array | None],
    vocab_size: int,
) -> Arrays:
    """Return the arrays of `LogitsProcessorTensors`, and `mask_indices` [L], for rows with these, [L] each.

    `masks` come with the step and apply in addition to the rows' own.
    """
    words: list[Int32Array] = []
    indices = np.full(len(masks), -1, dtype=np.int64)
    asking: list[tuple[int, LogitsProcessorParams]] = []
    for at, (asked, index, allowed) in enumerate(zip(processors, output_indices.tolist(), masks, strict=True)):
        if asked is not None:
            asking.append((at, asked))
            own = asked.mask(index)
            allowed = own if allowed is None else allowed if own is None else own & allowed[: len(own)]  # noqa: PLW2901
        if allowed is not None:
            indices[at] = len(words)
            words.append(allowed)
    num_words, bad = -(-vocab_size // 32), [(at, asked) for at, asked in asking if len(asked.banned)]
    longest = max((asked.bad_tokens.shape[1] for _, asked in bad), default=0)
    padded = [np.pad(asked.bad_tokens, ((0, 0), (0, longest - asked.bad_tokens.shape[1]))) for _, asked in bad]
    return {
        "mask_indices": indices,
        "masks": np.stack([each[:num_words] for each in words]) if words else np.zeros((0, num_words), np.int32),
        "biased": _joined([at * vocab_size + asked.biased for at, asked in asking], np.int64),
        "biases": _joined([asked.biases for _, asked in asking], np.float32),
        "bad_rows": _joined([np.full(len(asked.banned), at) for at, asked in bad], np.int64),
        "bad_lens": _joined([asked.bad_lens for _, asked in bad], np.int64),
        "bad_tokens": np.concatenate(padded) if padded else np.zeros((0, 0), dtype=np.int64),
        "banned": _joined([at * vocab_size + asked.banned for at, asked in bad], np.int64),
    }


def _joined(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype=dtype)


def process_logits(
    logits: Tensor, metadata: SamplingMetadata, context: Context, processors: LogitsProcessorTensors
) -> Tensor:
    """Return a copy of logits [L, V] float32 with all logits processors applied. Does not synchronize."""
    apply = _process_by_triton if uses_triton(logits.device, logits.dtype) else process_by_torch
    processed = apply(logits, metadata, context, processors.masks)
    flat = processed.view(-1)
    flat.scatter_add_(0, processors.biased, processors.biases)
    if len(processors.banned):
        flat.scatter_add_(0, processors.banned, _bans(context, processors))
    return processed


def _process_by_triton(logits: Tensor, metadata: SamplingMetadata, context: Context, masks: Tensor) -> Tensor:
    from octavo.kernels.triton.logits import process_logits as kernel

    known = context.token_ids, context.rows, context.num_tokens, metadata.num_prompt_tokens
    penalties = metadata.repetition, metadata.presence, metadata.frequency
    return kernel(logits, known, context.max_tokens, penalties, metadata.mask_indices, masks)


def process_by_torch(logits: Tensor, metadata: SamplingMetadata, context: Context, masks: Tensor) -> Tensor:
    """Return a copy [L, V] with penalties and masks applied. The specification of the Triton kernel."""
    processed = _penalize(logits, metadata, context) if context.has_penalties else logits.clone()
    if not len(masks):
        return processed
    words = masks.index_select(0, metadata.mask_indices.clamp(min=0))  # [L, W]
    bits = torch.ones_like(words[0, :1]) << torch.arange(32, dtype=torch.int32, device=words.device)
    is_banned = ((words[:, :, None] & bits) == 0).view(len(words), -1)[:, : logits.shape[1]]
    return processed.masked_fill_(is_banned & (metadata.mask_indices >= 0)[:, None], -torch.inf)


def _penalize(logits: Tensor, metadata: SamplingMetadata, context: Context) -> Tensor:
    """Return a copy [L, V] with penalties on tokens that occurred.

    The repetition penalty divides positive logits and multiplies negative ones, of prompt and output (Keskar et al.,
    "CTRL", 2019, section 4.1; negative logits as in Hugging Face transformers). `frequency_penalty` is subtracted per
    occurrence in the output and `presence_penalty` once (OpenAI's API).
    """
    token_ids = context.token_ids[:, : context.max_tokens].index_select(0, context.rows).to(torch.int64)  # [L, C]
    places = torch.arange(token_ids.shape[1], device=logits.device)
    is_known = (places < context.num_tokens[:, None]) & (token_ids < logits.shape[1])  # [L, C]
    is_output = is_known & (places >= metadata.num_prompt_tokens[:, None])
    # What is not known repeats the first token: every occurrence of a token writes the same value.
    token_ids = torch.where(is_known, token_ids, token_ids[:, :1]).clamp(max=logits.shape[1] - 1)
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    said = counts.scatter_add_(1, token_ids, is_output.to(torch.int32)).gather(1, token_ids)  # [L, C]
    seen, factors = logits.gather(1, token_ids), metadata.repetition[:, None].float()
    seen = torch.where(seen < 0, seen * factors, seen / factors)
    less = (said.double() * metadata.frequency[:, None] + metadata.presence[:, None]).float()
    return logits.scatter(1, token_ids, torch.where(said > 0, seen - less, seen))


def _bans(context: Context, processors: LogitsProcessorTensors) -> Tensor:
    """Return -inf for each bad word [H] whose other tokens are the latest ones of its row, else 0."""
    places = torch.arange(processors.bad_tokens.shape[1], device=processors.banned.device)  # [K]
    starts = context.num_tokens[processors.bad_rows] - processors.bad_lens  # [H]
    at = (starts[:, None] + places).clamp(0, context.token_ids.shape[1] - 1)  # [H, K]
    known = context.token_ids[context.rows[processors.bad_rows][:, None], at]
    is_same = (known == processors.bad_tokens) | (places >= processors.bad_lens[:, None])
    is_complete = is_same.all(-1) & (starts >= 0)
    return torch.where(is_complete, -torch.inf, 0.0).to(torch.float32)
