"""Logits processors: penalties, logit bias, bad words of several tokens, and masks: of `allowed_token_ids`, other bad
words, `min_tokens`, and those that come with a step.

Nothing is kept between steps: tokens are counted in the rows' contexts where the logits are, including those that the
host has not received yet, so no state can go stale.

Legend: L = rows of logits, V = vocabulary size, N = rows of the worker, C = maximum tokens of a context, M = masks, W =
words of a mask, B = biases, H = bad words of several tokens, K = tokens of the longest one minus 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.dispatch import uses_triton
from octavo.sampling.draw import SamplingMetadata

Arrays = dict[str, NDArray[np.generic]]


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
