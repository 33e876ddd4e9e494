"""A token for each row, on the device and without asking it anything: rows that are neither filtered nor edited.

Equal, row by row, to what the `Sampler` gives them. All that differs between rows is in tensors, so it can be captured.

Legend: L = logits rows of the step, S = rows of one slice, V = vocabulary size.
"""

import torch
from torch import Tensor

from octavo.kernels.triton.selection import uses_triton
from octavo.sampling.mass import relative_logits
from octavo.sampling.noise import NoiseKeys, gumbel_for_all

_SLICE = 2**23  # logits at once: their float64 intermediates take some 0.5 GB


def draw_plain(logits: Tensor, temperatures: Tensor, keys: NoiseKeys) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit [L] and its token [L] int64: logits are [L, V] float32, temperatures [L] float64.

    Temperature 0 is the arg-max, ties to the lowest id. A row whose largest logit is not finite gets some token.
    """
    largest, tokens = logits.max(-1)
    if uses_triton(logits.device, logits.dtype):
        from octavo.kernels.triton.draw import draw

        drawn = draw(logits, largest, temperatures, keys.seed_low, keys.seed_high, keys.output_indices)
        return largest, torch.where(temperatures > 0.0, drawn, tokens)
    rows_at_once = max(1, _SLICE // logits.shape[1])
    for start in range(0, len(logits), rows_at_once):
        part = slice(start, start + rows_at_once)
        is_drawn = temperatures[part] > 0.0  # [S]
        scores = relative_logits(logits[part], torch.where(is_drawn, temperatures[part], 1.0))  # [S, V]
        scores += gumbel_for_all(keys.take(part), logits.shape[1])
        tokens[part] = torch.where(is_drawn, scores.argmax(-1), tokens[part])
    return largest, tokens
