"""Parts of decoders that some families have instead of the common ones.

Legend: T = tokens, W = tokens kept after the last layer's attention (see `ForwardBatch`), D = hidden size.
"""

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.layers.context import BuildContext
from octavo.layers.norm import NoNorm, RMSNorm
from octavo.layers.plain_mlp import PlainMLP
from octavo.models.common import DecoderAttention, GatedMLP


class ParallelLayer(nn.Module):
    """A block whose attention and MLP read the same norm; both are added to the stream."""

    def __init__(
        self, norm: RMSNorm, attention: DecoderAttention, mlp: GatedMLP | PlainMLP, *, context: BuildContext
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp = norm, attention, mlp
        self._kernels, self._nothing = context.kernels, NoNorm(context=context)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Given the previous block's output x [T, D] and the residual stream [T, D], return the same for this block.

        The last block returns [W, D].
        """
        kernels, is_last = self._kernels, self.attention.is_last
        normed, total = self.attention_norm.add(x, residual)
        attended, normed = self.attention(self._nothing, normed, None, kv_cache, step)
        (total,) = step.rows_after(kernels, total, is_last=is_last)
        adapter_ids = step.adapter_ids_after(is_last=is_last)
        return kernels.scaled_sum(attended, self.mlp.of_normed(normed, adapter_ids), 1.0), total
