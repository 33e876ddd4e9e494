"""Runs a model over a text, block by block, and records the inputs of its linear layers.

Legend: T = tokens of the text, K = inputs of a linear layer, D = hidden size, R = passages.
"""

from collections.abc import Iterable, Iterator

import torch

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.attention.torch_sdpa import SdpaAttention
from octavo.config.model import ModelConfig
from octavo.errors import UnsupportedModelError
from octavo.kernels.reference import Kernels
from octavo.kernels.types import PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear
from octavo.models.registry import initialize_model
from octavo.models.weights import load_weights, process_weights_after_loading

_BLOCK_SIZE = 16  # tokens of a block of KV memory

Grams = dict[MergedLinear, torch.Tensor]  # x.T @ x of a layer's inputs, [K, K] float32


class RecordingKernels(Kernels):
    """The reference kernels. They add x.T @ x to the Gram matrix of every linear that is in `grams`."""

    name = "recording"

    def __init__(self) -> None:
        self.grams: dict[int, torch.Tensor] = {}  # by id of the packed linear: [K, K] float32

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        if (gram := self.grams.get(id(packed))) is not None:
            gram.addmm_(x.T, x)
        return super().linear(x, packed)


class RecordedModel:
    """A model in float32, and the residual stream of a text before one of its blocks."""

    def __init__(
        self, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]], passages: list[list[int]]
    ) -> None:
        self._kernels = RecordingKernels()
        attention = SdpaAttention(self._kernels, torch.float32)
        context = BuildContext(
            kernels=self._kernels, attention=attention, dtype=torch.float32, device=torch.device("cpu")
        )
        model = initialize_model(config, context)
        if config.recurrent_layers or any(spec.latent is not None for spec in config.attending):
            raise UnsupportedModelError(f"{config.model}: {config.architecture} cannot be calibrated yet")
        load_weights(model, tensors)
        process_weights_after_loading(model)
        self.model = model.eval()
        with torch.inference_mode():
            # One step of all passages, each a request with blocks of its own.
            width = -(-max(map(len, passages)) // _BLOCK_SIZE)
            tables = [list(range(at * width, (at + 1) * width)) for at in range(len(passages))]
            starts = [0] * len(passages)
            batch = ForwardBatch.of_sequences(passages, starts, tables, _BLOCK_SIZE, config.kv_groups)
            self._step, self._x = model.attention_step(batch), model.embed(batch)  # [T, D]
        self._residual: torch.Tensor | None = None  # [T, D]
        layout = attention.kv_layout(config.attention(0).head_dim)
        shape = (batch.block_table.numel() * _BLOCK_SIZE, model.heads.kv.size, layout.head_size)
        key, value = (torch.zeros(shape, dtype=layout.dtype) for _ in range(2))
        self._cache = LayerKVCache(key=key, value=value)

    def blocks(self) -> Iterator[Grams]:
        """Yield what the linears of each block read, first block to last.

        Changes to a block's weights that are made before the next block is requested affect that block's inputs.
        """
        for block in self.model.layers.values():
            grams = {
                part: torch.zeros(part.inputs.size, part.inputs.size)
                for part in block.modules()
                if isinstance(part, MergedLinear) and part.role != "router"
            }
            self._kernels.grams = {id(layer.packed): gram for layer, gram in grams.items()}
            with torch.inference_mode():
                block(self._x, self._residual, self._cache, self._step)
            self._kernels.grams = {}
            yield grams
            with torch.inference_mode():
                self._x, self._residual = block(self._x, self._residual, self._cache, self._step)

    def head(self) -> Iterator[Grams]:
        """Yield what the logits head reads, once all blocks have been run."""
        assert self._residual is not None, "blocks come first"
        with torch.inference_mode():
            hidden, _ = self.model.norm.add(self._x, self._residual)
            gram = hidden.T @ hidden
        yield {self.model.logits_head: gram}
