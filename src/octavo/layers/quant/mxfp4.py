"""Experts in MXFP4 (Rouhani et al. 2023, arXiv:2310.10537), as in gpt-oss, computed in GGUF's blocks of that type.

Both layouts hold the same codes and exponents of each 32 inputs, so that one becomes the other without rounding.

Legend: N = outputs, K = inputs.
"""

import math

import torch

from octavo.config.json_fields import JsonFields
from octavo.gguf.types import GGML_NUMBERS, GGML_TYPES
from octavo.kernels.blocks import BlockFormat
from octavo.kernels.quantization import WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, WeightScheme
from octavo.layers.quant.gguf import BlockScheme

MXFP4 = GGML_TYPES[GGML_NUMBERS["MXFP4"]]
_SCHEME = BlockScheme((MXFP4,))
_LOW = 0x0F0F0F0F0F0F0F0F  # the low halves of eight bytes
_MEAN_SQUARE = 8.5625  # of the values of all codes


class Mxfp4Schemes:
    """See `Schemes`. All other layers of such a checkpoint are dense."""

    name = "mxfp4"
    forms: frozenset[WeightFormat | None] = frozenset(
        {None, BlockFormat(types=(MXFP4.name,), sizes=(1,), row_inputs=MXFP4.block_size)}
    )

    def __init__(self, fields: JsonFields) -> None:
        """Take the checkpoint's settings: none of them says more than the name of the format."""

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        return _SCHEME if ".experts." in layer else DENSE


def arbitrary_rows(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return rows of blocks [N, K / 32 * 17] with arbitrary codes; products keep about the variance of their inputs."""
    blocks = torch.randint(0, 256, (shape[0], shape[1] // MXFP4.block_bytes, MXFP4.block_bytes), generator=generator)
    in_size = blocks.shape[1] * MXFP4.block_size
    blocks[..., 0] = 127 - round(math.log2(_MEAN_SQUARE * in_size) / 2)
    return blocks.to(torch.uint8).flatten(1)


def rows_of_blocks(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return rows of GGUF's blocks [N, K / 32 * 17] of codes [N, K / 32, 16] and exponents [N, K / 32], all uint8.

    In a checkpoint a byte has inputs 2j and 2j + 1, in a block j and j + 16, the first in the low bits.
    """
    first, second = codes.contiguous().view(torch.int64).unbind(-1)  # of inputs 0 to 15, and of 16 to 31
    even = first & _LOW | (second & _LOW) << 4
    odd = first >> 4 & _LOW | second & ~_LOW
    pairs = odd.unsqueeze(-1).view(torch.uint8).to(torch.int16) << 8 | even.unsqueeze(-1).view(torch.uint8)
    return torch.cat((exponents.unsqueeze(-1), pairs.view(torch.uint8)), dim=-1).flatten(1)
