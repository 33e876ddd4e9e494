"""Experts in MXFP4 (Rouhani et al. 2023, arXiv:2310.10537), as in gpt-oss, computed in GGUF's blocks of that type.

Both layouts hold the same codes and exponents of each 32 inputs, so that one becomes the other without rounding.

Legend: N = outputs, K = inputs.
"""

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


def rows_of_blocks(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return rows of GGUF's blocks [N, K / 32 * 17] of codes [N, K / 32, 16] and exponents [N, K / 32], all uint8.

    In a checkpoint a byte has inputs 2j and 2j + 1, in a block j and j + 16, the first in the low bits.
    """
    blocks = torch.empty(*exponents.shape, MXFP4.block_bytes, dtype=torch.uint8, device=codes.device)
    first, second = codes[..., :8], codes[..., 8:]
    blocks[..., 0] = exponents
    blocks[..., 1::2] = first & 15 | second << 4
    blocks[..., 2::2] = first >> 4 | second & 0xF0
    return blocks.flatten(1)
