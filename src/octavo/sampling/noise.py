"""Counter-based noise: Gumbel noise as a pure function of (seed, output index, token id), so it is batch-invariant.

The integers are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) on every device; `tests/sampling/philox_vectors.json` has test vectors for kernels. torch has no arithmetic on
unsigned 32-bit words, so words are stored in int64 tensors.

Legend: R = rows sampled together, V = vocabulary size.
"""

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]  # four 32-bit words in int64 tensors that broadcast

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def gumbel_noise(seed_low: Tensor, seed_high: Tensor, output_indices: Tensor, vocab_size: int) -> Tensor:
    """Return the noise of all token ids in rows of these seeds and output indices, [R] int64 each: float64 [R, V]."""
    blocks = torch.arange((vocab_size + 3) // 4, device=seed_low.device).expand(len(seed_low), -1)  # [R, V / 4]
    zero = torch.zeros_like(blocks)
    counter = (blocks, output_indices[:, None], zero, zero)
    words = torch.stack(philox4x32(counter, (seed_low[:, None], seed_high[:, None])), dim=-1)  # [R, V / 4, 4]
    return gumbel_of(words.view(len(seed_low), -1)[:, :vocab_size])


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Encrypt a 128-bit counter with a 64-bit key: four uniform 32-bit words.

    Words 0 and 2 of the counter have the full shape; the others broadcast to it. Bits above the 32nd of the two low
    products are masked only in the next round, which saves two of twelve operations.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = product1, product0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel_of(words: Tensor) -> Tensor:
    """Convert 32-bit words to Gumbel noise: float64, same shape.

    u = (word + 1/2) / 2^32 has 33 significant bits, so float64 holds it exactly near 0 and near 1, and both logarithms
    are accurate to the last bits. Both are element-wise, so a value does not depend on its position.
    """
    uniform = words.contiguous().double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()
