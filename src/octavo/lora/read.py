"""Reads an adapter's files for one rank of a model, and checks every tensor against it.

Legend: r = rank of the adapter of one module, V = vocabulary, D = hidden size.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.errors import AdapterError
from octavo.layers.linear import MergedLinear
from octavo.layers.vocabulary import Embedding, EmbeddingAdapter, LogitsHead
from octavo.loader.safetensors import read_file
from octavo.loader.torch_pt import read_state_dict
from octavo.lora.adapter_config import AdapterConfig, read_adapter_config
from octavo.lora.base_weights import BaseWeights
from octavo.lora.folder import SAFETENSORS_FILE, weights_file
from octavo.lora.found import FoundTensors
from octavo.lora.rank_adapter import HeadAdapter, LayerAdapter, LowRank, RankAdapter
from octavo.lora.targets import AdapterTargets, Target


class AdapterReader:
    """Reads adapters of ranks up to `max_rank` for the layers of one rank, which compute in `dtype`."""

    def __init__(self, targets: AdapterTargets, base: BaseWeights, max_rank: int, dtype: torch.dtype) -> None:
        self._targets, self._base, self._max_rank, self._dtype = targets, base, max_rank, dtype

    def read(self, folder: Path) -> RankAdapter:
        """Read the adapter in a folder.

        Raises:
            CheckpointError: a file is missing, truncated or malformed, or asks for code to be run.
            AdapterError: an adapter of a kind that is not supported, or one that does not fit the model; names the
                setting or the tensor.
        """
        reading = _Reading(self._base, self._max_rank, self._dtype, folder)
        for module in reading.found.by_module:
            if (target := self._find(reading.found, module)) is not None:
                reading.take(module, target)
        return reading.result()

    def _find(self, found: FoundTensors, module: str) -> Target | None:
        try:
            return self._targets.find(module)
        except AdapterError as error:
            raise found.error(module, str(error)) from None


class _Reading:
    """One adapter being read."""

    def __init__(self, base: BaseWeights, max_rank: int, dtype: torch.dtype, folder: Path) -> None:
        self._base, self._max_rank, self._dtype = base, max_rank, dtype
        self._config: AdapterConfig = read_adapter_config(folder)
        self.found = FoundTensors(str(weights_file(folder)))
        for name, tensor in adapter_tensors(folder):
            self.found.add(name, tensor)
        self._linears: dict[str, tuple[MergedLinear, dict[str, LowRank]]] = {}  # by path, then part
        self._embeddings: dict[str, EmbeddingAdapter] = {}
        self._heads: dict[str, HeadAdapter] = {}

    def take(self, module: str, target: Target) -> None:
        """Check a module's tensors, and keep this rank's part."""
        match target.layer:
            case Embedding() as layer:
                self._embeddings[target.path] = self._embedding(module, layer)
            case LogitsHead() as layer:
                self._heads[target.path] = self._head(module, layer)
            case layer:
                what = "a linear layer: only embeddings and logits heads can be replaced (modules_to_save)"
                self.found.allow(module, frozenset({"down", "up"}), what)
                _, parts = self._linears.setdefault(target.path, (layer, {}))
                parts[target.part] = self._low_rank(module, layer, target.part)

    def result(self) -> RankAdapter:
        """Return the adapter."""
        return RankAdapter(
            layers={path: LayerAdapter.of(layer, parts, self._dtype) for path, (layer, parts) in self._linears.items()},
            embeddings=self._embeddings,
            heads=self._heads,
        )

    def _rank(self, module: str) -> int:
        rank = self._config.rank_of(module)
        if rank > self._max_rank:
            raise self.found.error(module, f"rank {rank} exceeds max_lora_rank={self._max_rank}")
        return rank

    def _low_rank(self, module: str, layer: MergedLinear, part: str) -> LowRank:
        rank, outputs = self._rank(module), layer.parts[part]
        down = self.found.tensor(module, "down", (rank, layer.inputs.total))
        up = self.found.tensor(module, "up", (outputs.total, rank))
        return self._checked(module, LowRank(down=down, up=up, scale=self._config.scale_of(module)))

    def _embedding(self, module: str, layer: Embedding) -> EmbeddingAdapter:
        self.found.allow(module, frozenset({"embedding_down", "embedding_up", "weight", "base_weight"}), "an embedding")
        (size, width), ids, rank = (layer.ids.total, layer.hidden_size), layer.ids, self._rank(module)
        table = self._replacement(module, (size, width), ids.start, ids.stop)
        if not self.found.has(module, "embedding_down", "embedding_up"):
            return EmbeddingAdapter(table=table)
        down = self.found.tensor(module, "embedding_down", (rank, size))
        up = self.found.tensor(module, "embedding_up", (width, rank))
        low = self._checked(module, LowRank(down=down, up=up, scale=self._config.scale_of(module)))
        of_ids = low.down[:, ids.start : ids.stop].T.to(self._dtype, copy=True).contiguous()
        return EmbeddingAdapter(table=table, down=of_ids, up=low.scaled_up(self._dtype))

    def _head(self, module: str, layer: LogitsHead) -> HeadAdapter:
        self.found.allow(module, frozenset({"down", "up", "weight", "base_weight"}), "a logits head")
        outputs, inputs = layer.parts[""], layer.inputs.total
        weight = self._replacement(module, (outputs.total, inputs), outputs.start, outputs.stop)
        if not self.found.has(module, "down", "up"):
            return HeadAdapter(weight=weight)
        low = self._low_rank(module, layer, "")
        up = low.scaled_up(self._dtype)[:, outputs.start : outputs.stop].contiguous()
        return HeadAdapter(weight=weight, down=low.down.to(self._dtype, copy=True), up=up)

    def _replacement(self, module: str, shape: tuple[int, int], start: int, stop: int) -> torch.Tensor | None:
        """Return this rank's rows of a weight that replaces the base model's; None: there is none."""
        if self.found.has(module, "base_weight"):
            saved = self.found.tensor(module, "base_weight", shape)
            if not self._base.has(module, saved):
                why = "differs from the base model's: the adapter was trained on another one; merge it with that one"
                raise self.found.error(module, why, "base_weight")
        if not self.found.has(module, "weight"):
            return None
        return self.found.tensor(module, "weight", shape)[start:stop].to(self._dtype, copy=True)

    def _checked(self, module: str, low: LowRank) -> LowRank:
        """Check that what was finite in the file still is in the model's dtype."""
        if not (low.down.to(self._dtype).isfinite().all() and low.scaled_up(self._dtype).isfinite().all()):
            raise self.found.error(module, f"its values exceed the range of {self._dtype}")
        return low


def adapter_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of every tensor in an adapter's file. Raises CheckpointError, AdapterError."""
    path = weights_file(folder)
    if path.name == SAFETENSORS_FILE:
        yield from read_file(path, elsewhere=())
    else:
        yield from read_state_dict(path).items()
