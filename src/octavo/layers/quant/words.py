"""Small integers packed in 32-bit words, the first in the lowest bits."""

import torch


def per_word(bits: int) -> int:
    """Return the number of integers per word."""
    return 32 // bits


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` integers of each row of words [..., W] int32, minus half their range: int8."""
    unpacked = torch.empty(*words.shape, per_word(bits), dtype=torch.int8, device=words.device)
    for place in range(per_word(bits)):
        unpacked[..., place] = ((words >> (bits * place)) & (2**bits - 1)) - 2 ** (bits - 1)
    return unpacked.flatten(-2)[..., :count]
