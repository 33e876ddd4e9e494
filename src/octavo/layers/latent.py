"""The weights by which heads read a latent vector: absorbed into queries and outputs.

A head's key is K c, its value V c, c being the front of the cached vector. Then q (K c) = (K^T q) c, and the weighted
sum of values is V times that of the vectors: neither keys nor values are ever made (DeepSeek-AI 2024,
arXiv:2405.04434, section 2.1.2).

Legend: H = heads of this rank, R = rank of the latent vector, N = size of a head's key made of it, V = of its value.
"""

from collections.abc import Mapping, Sequence

import torch

from octavo.config.layers import LatentSpec
from octavo.distributed.groups import Share
from octavo.kernels.types import PackedHeads, PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import PlainWeights, WeightOwner


class AbsorbedHeads(WeightOwner):
    """What checkpoints call kv_b: [H * (N + V), R], for each head the rows of its key, then of its value.

    Computed dense in any case: quantized ones are expanded. It is a small part of a layer.
    """

    def __init__(self, heads: Share, latent: LatentSpec, *, context: BuildContext) -> None:
        super().__init__()
        self._context, self._latent, self._heads = context, latent, heads
        self._outputs, self._inputs = heads.times(latent.key_size + latent.value_size), Share.whole(latent.rank)
        self.scheme = context.scheme(("",), "plain")
        self._loaded: dict[str, torch.Tensor] = {}  # until packed
        self._packed: tuple[PackedHeads, PackedHeads] | None = None

    @property
    def keys(self) -> PackedHeads:
        """By which queries [N] become queries of the vector [R]."""
        assert self._packed is not None, "process_weights_after_loading has not run"
        return self._packed[0]

    @property
    def values(self) -> PackedHeads:
        """By which sums of vectors [R] become sums of values [V]."""
        assert self._packed is not None, "process_weights_after_loading has not run"
        return self._packed[1]

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return self.scheme.tensors(self._outputs.total, self._inputs.total)

    @property
    def num_weights(self) -> int:
        return self._outputs.size * self._inputs.size

    @property
    def layout(self) -> str:
        return repr(self.scheme)

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self._loaded[name] = tensor

    def process_weights_after_loading(self) -> None:
        if self._packed is None:
            self._pack(self._dense(self._loaded))
            self._loaded.clear()

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": self._dense(tensors)}

    def adopt_shard(self, tensors: Mapping[str, torch.Tensor]) -> None:
        weight, expected = tensors["weight"], (self._outputs.size, self._inputs.size)
        if tuple(weight.shape) != expected:
            raise ValueError(f"shape {list(expected)} is expected, found {list(weight.shape)}")
        self._pack(weight)

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        if self._context.kernels.layout is None:
            return None
        linears = {f"keys.{head}": linear for head, linear in enumerate(self.keys.linears)}
        linears |= {f"values.{head}": linear for head, linear in enumerate(self.values.linears)}
        return {
            f"{at}.{name}": tensor for at, each in linears.items() for name, tensor in each.packed_tensors().items()
        }

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        latent, adopt = self._latent, self._context.kernels.adopt_linear

        def linears(kind: str, shape: tuple[int, int]) -> list[PackedLinear]:
            starts = (f"{kind}.{head}." for head in range(self._heads.size))
            of_heads = (
                {name.removeprefix(at): t for name, t in tensors.items() if name.startswith(at)} for at in starts
            )
            return [adopt(parts, shape, "plain") for parts in of_heads]

        self._combine(
            linears("keys", (latent.rank, latent.key_size)), linears("values", (latent.value_size, latent.rank))
        )

    def _dense(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's heads [H * (N + V), R] in the context's dtype."""
        weight = self.scheme.weight(tensors, self._outputs, self._inputs)
        dense = weight if isinstance(weight, torch.Tensor) else weight.dequantized()
        return dense.to(self._context.device, self._context.dtype)

    def _pack(self, weight: torch.Tensor) -> None:
        kernels, latent = self._context.kernels, self._latent
        by_head = weight.view(self._heads.size, latent.key_size + latent.value_size, latent.rank)
        keys, values = by_head.split_with_sizes((latent.key_size, latent.value_size), dim=1)
        self._combine(
            [kernels.pack_linear(key.T.contiguous(), None) for key in keys],
            [kernels.pack_linear(value.contiguous(), None) for value in values],
        )

    def _combine(self, keys: Sequence[PackedLinear], values: Sequence[PackedLinear]) -> None:
        pack, latent = self._context.kernels.pack_heads, self._latent
        self._packed = pack(keys, latent.key_size), pack(values, latent.rank)


class LatentNorm(PlainWeights):
    """The weights [R] of the norm of a latent vector, which attention computes; float32."""

    def __init__(self, rank: int, *, context: BuildContext) -> None:
        weight = torch.empty(rank, dtype=torch.float32, device=context.device)
        super().__init__({"weight": weight}, context=context)
        self.weight = weight
