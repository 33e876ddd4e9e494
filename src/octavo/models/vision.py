"""Language models with a vision tower: what towers share (Dosovitskiy et al. 2020, arXiv:2010.11929), and the decoder.

Patches are in the order in which the processor writes them: frame by frame, in each of them one square of merged
patches after the other. Images of a step are computed together where an op is batch-invariant (linears, norms) and one
by one elsewhere (attention, exact GELU), so that an image's embeddings have the same bits in any batch.

Legend: P = patches of an image or of all, and class tokens if there are any; M = merged squares of an image, C = values
of a patch, V = the tower's hidden size, H = heads of this rank, E = head size, N = tokens of an image, D = the language
model's hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import nn

from octavo.attention.base import EncoderHeads, EncoderSegments
from octavo.config.model import ModelConfig, VisionConfig
from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, MergedLinear, QKVLinear
from octavo.layers.quant.base import QuantizedAtLoad, TensorSpec
from octavo.models.interfaces import CausalLM

Grid = tuple[int, int, int]  # of an image: (pairs of) frames, rows and columns of patches


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchLayout:
    """The patches of one image in the order in which the tower computes them."""

    order: torch.Tensor | None  # [M] int64: each merged square, by its number in the input; None: as in the input
    rows: torch.Tensor  # [P] int64
    columns: torch.Tensor  # [P] int64
    frames: list[int]  # patches of each frame: layers that see the whole image attend within these
    windows: list[int]  # patches of each window; equals `frames` where there are none

    @classmethod
    def of(cls, grid: Grid, config: VisionConfig) -> Self:
        """Lay out an image. Windows are squares of `window_size` pixels; those at right and lower edges are smaller."""
        (num_frames, height, width), merge, unit = grid, config.spatial_merge_size, config.merge_unit
        axes = torch.arange(height)[:, None].expand(height, width), torch.arange(width).expand(height, width)
        squares = (height // merge, merge, width // merge, merge)
        rows, columns = (axis.reshape(squares).transpose(1, 2).flatten().repeat(num_frames) for axis in axes)
        frames = [height * width] * num_frames
        if config.window_size is None:
            return cls(order=None, rows=rows, columns=columns, frames=frames, windows=frames)
        side, order = config.window_size // merge // config.patch_size, []
        numbers = torch.arange(num_frames * (height // merge) * (width // merge))
        for frame in numbers.view(num_frames, height // merge, width // merge):
            for band in frame.split(side, dim=0):
                order += [window.flatten() for window in band.split(side, dim=1)]
        windows, whole = [len(window) * unit for window in order], torch.cat(order)
        rows, columns = (axis.view(-1, unit)[whole].flatten() for axis in (rows, columns))
        return cls(order=whole, rows=rows, columns=columns, frames=frames, windows=windows)

    def arranged(self, squares: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Bring merged squares [M, ...] from the order of the input into this one, or back."""
        if self.order is None:
            return squares
        return squares[(self.order.argsort() if back else self.order).to(squares.device)]


class VisionTower(nn.Module, ABC):
    """A tower, including the projection of its output to the language model's size."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        """Build without weights. They stay dense: quantized checkpoints leave towers as they are, too."""
        super().__init__()
        self.config = config
        self.context = replace(context, schemes=QuantizedAtLoad()).at("vision")

    @classmethod
    @abstractmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        """Return the names of all weights in the checkpoint, and their places in the tower."""

    @classmethod
    def ignored_weights(cls, config: VisionConfig) -> tuple[str, ...]:
        """Return the prefixes of tensors in checkpoints that the tower does not use."""
        return ()

    @abstractmethod
    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Return each image's embeddings [N, D * outputs], outputs being `VisionConfig.num_outputs`.

        `patches` [P, C] are those of all images in the order of the processor.
        """


def names_under(name: str, place: str, table: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.{inner}": f"{place}.{target}" for inner, target in table.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionStep:
    """What all layers share: the segments of patches that attend to themselves, one image after the other."""

    frames: EncoderSegments
    windows: EncoderSegments


class PatchEmbedding(MergedLinear):
    """A convolution whose stride is its kernel: a linear of flattened patches."""

    def __init__(self, config: VisionConfig, *, has_bias: bool, context: BuildContext) -> None:
        outputs = {"": Share.whole(config.hidden_size)}
        super().__init__(Share.whole(config.patch_values), outputs, has_bias=has_bias, context=context)
        times = (config.temporal_patch_size,) if config.temporal_patch_size > 1 else ()  # of a 3D convolution
        self._kernel = (config.in_channels, *times, config.patch_size, config.patch_size)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        [outputs] = self.parts.values()
        return super().checkpoint_tensors() | {"weight": TensorSpec((outputs.total, *self._kernel))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor.flatten(1) if name == "weight" else tensor)

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().shard_of({**tensors, "weight": tensors["weight"].flatten(1)})


class VisionAttention(nn.Module):
    """Bidirectional attention within each segment."""

    def __init__(self, config: VisionConfig, context: BuildContext, *, in_windows: bool) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self._in_windows = in_windows
        self.qkv = QKVLinear(size, heads, heads, size // heads, has_bias=True, context=context.at("qkv"))
        self.out = Linear(self.qkv.parts["q"], size, has_bias=True, context=context.at("out"))
        self._heads = EncoderHeads(count=self.qkv.heads.query.size, size=size // heads)

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Attend: x [P, V] to [P, V]."""
        return self.attended(self.qkv(x), step)

    def attended(self, qkv: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Attend, given the projection [P, 3 * H * E]: [P, V]."""
        segments = step.windows if self._in_windows else step.frames
        out: torch.Tensor = self.out(segments.attend(qkv, self._heads))
        return out


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__()
        group = context.groups.tensor
        inner = Share.of_features(config.intermediate_size, group.rank, group.size)
        assert config.activation != "silu", "that is gated"
        self._kernels, self._gelu = context.kernels, config.activation
        whole = Share.whole(config.hidden_size)
        self.up = MergedLinear(whole, {"": inner}, has_bias=True, context=context.at("up"))
        self.down = Linear(inner, config.hidden_size, has_bias=True, context=context.at("down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to x [P, V]."""
        down: torch.Tensor = self.down(self._kernels.gelu(self.up(x), self._gelu))
        return down


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP around one residual stream."""

    def __init__(self, norms: Iterable[nn.Module], attention: VisionAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Apply to x [P, V]."""
        x = x + self.attention(self.attention_norm(x), step)
        mlp: torch.Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp


class VisionLanguageModel(CausalLM):
    """A mixin for a decoder."""

    tower: ClassVar[type[VisionTower]]

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        assert config.vision is not None, f"{config.architecture} has a vision tower"
        # The layers that read the tower's output must be those of the first stage, and not the model's last.
        num_deepstack, last = len(config.vision.deepstack_layers), self.stage.layers.stop - self.stage.is_last
        if self.stage.is_first and num_deepstack > last:
            read = f"{num_deepstack} decoder layers read the vision tower's output"
            limit = f"but the first pipeline stage has {last} that can"
            raise UnsupportedModelError(f"{config.path}: deepstack_visual_indexes: {read}, {limit}")
        if self.stage.is_first:
            self.vision = self.tower(config.vision, self.context)

    @property
    def encoder(self) -> VisionTower | None:
        return self.vision if self.stage.is_first else None

    @cached_property
    def _tower_names(self) -> dict[str, str]:
        assert self.config.vision is not None
        names = self.tower.weight_names(self.config.vision)
        return {name: f"vision.{target}" for name, target in names.items()}

    @property
    def weight_targets(self) -> Mapping[str, str]:
        return {**super().weight_targets, **self._tower_names}

    def ignores_weight(self, name: str) -> bool:
        assert self.config.vision is not None
        return super().ignores_weight(name) or name.startswith(self.tower.ignored_weights(self.config.vision))

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        others = super().parts_on_other_ranks
        return others if self.stage.is_first else others | frozenset(self._tower_names.values())

    @property
    def split_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """Towers have queries, keys and values in one tensor."""
        names = (name.removesuffix(".q") for name in self._tower_names if name.endswith(".qkv.q"))
        return {
            f"{name}.{suffix}": tuple(f"{name}.{part}.{suffix}" for part in "qkv")
            for name in names
            for suffix in ("weight", "bias")
        }
