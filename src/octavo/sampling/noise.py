"""Counter-based noise: Gumbel noise as a pure function of (seed, output index, token id), so it is batch-invariant.

The integers are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) on every device; `tests/sampling/philox_vectors.json` has test vectors for kernels. torch has no arithmetic on
unsigned 32-bit words, so words are stored in int64 tensors.

Legend: R = rows sampled together, V = vocabulary size, K = chosen token ids per row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]  # four 32-bit words in int64 tensors that broadcast

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseKeys:
    """Seed and output index of each row."""

    seed_low: Tensor  # [R] int64, the seed's low 32 bits
    seed_high: Tensor  # [R] int64, its high 32 bits
    output_indices: Tensor  # [R] int64, i: the row samples its i-th output token

    def take(self, rows: Tensor | slice) -> "NoiseKeys":
        """Return the entries of `rows` [R'], a mask, indices or a slice."""
        return NoiseKeys(
            seed_low=self.seed_low[rows], seed_high=self.seed_high[rows], output_indices=self.output_indices[rows]
        )


def gumbel_for_all(keys: NoiseKeys, vocab_size: int) -> Tensor:
    """Return the noise of all token ids: float64 [R, V]."""
    num_blocks = (vocab_size + 3) // 4
    blocks = torch.arange(num_blocks, device=keys.seed_low.device)[None, :]  # [1, V / 4]
    words = torch.stack(_random_words(keys, blocks), dim=-1)  # [R, V / 4, 4]
    return gumbel_of(words.view(len(keys.seed_low), -1)[:, :vocab_size])


def gumbel_for(keys: NoiseKeys, token_ids: Tensor) -> Tensor:
    """Return the noise of `token_ids` [R, K] int64, K ids per row: float64 [R, K]."""
    words = torch.stack(_random_words(keys, token_ids >> 2), dim=-1)  # [R, K, 4]
    return gumbel_of(words.gather(-1, (token_ids & 3)[..., None]).squeeze(-1))


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


def _random_words(keys: NoiseKeys, blocks: Tensor) -> Words:
    """Return four words per block of four token ids: `blocks` [R or 1, N] -> 4 x [R, N]."""
    blocks = blocks.expand(len(keys.output_indices), -1)  # [R, N]
    zero = torch.zeros_like(blocks)
    counter = (blocks, keys.output_indices[:, None], zero, zero)
    return philox4x32(counter, (keys.seed_low[:, None], keys.seed_high[:, None]))


def gumbel_of(words: Tensor) -> Tensor:
    """Convert 32-bit words to Gumbel noise: float64, same shape.

    u = (word + 1/2) / 2^32 has 33 significant bits, so float64 holds it exactly near 0 and near 1, and both logarithms
    are accurate to the last bits. Both are element-wise, so a value does not depend on its position.
    """
    uniform = words.contiguous().double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()
