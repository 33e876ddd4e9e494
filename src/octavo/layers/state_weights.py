"""`StateWeights`: the small weights of a layer that keeps a state, beside its projections: each rank has its channels.

In float32, as a checkpoint has them; those of a convolution after rounding to the model's dtype.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from octavo.distributed.groups import Share
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner


class StateWeights(WeightOwner):
    """What this rank has of them, by the checkpoint's names."""

    rounded: ClassVar[tuple[str, ...]] = ("conv.weight", "conv.bias")  # to the model's dtype

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, context: BuildContext) -> None:
        super().__init__()
        self._context, self._tensors = context, dict(tensors)

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors.values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        self._load(name, self.shard(name, tensor))

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self.shard(name, tensor) for name, tensor in tensors.items()}

    def adopt_shard(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._load(name, tensor)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)

    @abstractmethod
    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a checkpoint's tensor."""

    def scales(self, name: str) -> torch.Tensor | None:
        """Return what this rank's columns of a weight are multiplied by; None: nothing."""
        return None

    def _load(self, name: str, shard: torch.Tensor) -> None:
        if name in self.rounded:
            shard = shard.to(self._context.dtype)
        if name == "conv.weight":
            shard = shard.flatten(1).T
        elif name == "A_log":
            shard = shard.float().exp()
        if (scales := self.scales(name)) is not None:
            shard = shard.float() * scales
        self._tensors[name].copy_(shard)


def conv_spec(num_channels: int, conv_size: int) -> TensorSpec:
    """Return the spec of a convolution's weight: a tap for each token that it sees; GGUF files leave out an axis."""
    return TensorSpec((num_channels, 1, conv_size), other_shapes=((num_channels, conv_size),))


def channels_of(tensor: torch.Tensor, kinds: Sequence[Share]) -> torch.Tensor:
    """Return this rank's channels of each kind, of a tensor with all channels of all kinds."""
    by_kind = tensor.split_with_sizes([kind.total for kind in kinds])
    return torch.cat([rows[of.start : of.stop] for rows, of in zip(by_kind, kinds, strict=True)])
