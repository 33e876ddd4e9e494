"""A checkpoint with a LoRA adapter merged into its weights: W + scale * up @ down, in float32, rounded once.

Legend: r = rank, N = outputs, K = inputs, V = vocabulary, D = hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octavo.config.engine import LoadConfig, LoadFormat
from octavo.config.model import ModelConfig
from octavo.convert.source import Checkpoint
from octavo.errors import InvalidParameterError
from octavo.lora.files import read_adapter_config
from octavo.lora.read import AdapterReader, AdapterTargets, AdapterTensors
from octavo.models.weights import renamed, spelt_as_in_table
from octavo.worker.memory import empty_model


def check_adapter(config: ModelConfig, folder: Path, load_format: LoadFormat = "auto") -> None:
    """Read the adapter in a folder as a rank with the whole model would."""
    model, load = empty_model(config), LoadConfig(load_format=load_format, seed=0)
    max_rank = read_adapter_config(folder).largest_rank
    AdapterReader(model, AdapterTargets(model, experts=True), load, max_rank, torch.float32).read(folder)


_WEIGHT = ".weight"
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedCheckpoint(Checkpoint):
    """The base model's tensors, changed by an adapter."""

    found: AdapterTensors
    modules: Mapping[str, str]  # the adapter's names by those in the model's table
    unties_head: bool  # the base model's head is its embedding, and only one of them is changed

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model, left = empty_model(self.model), set(self.modules)
        for name, tensor in spelt_as_in_table(model, Checkpoint.tensors(self)):
            module = renamed(model, name.removesuffix(_WEIGHT))
            if self.unties_head and module == _EMBEDDING:
                left.discard(_HEAD)
                yield _HEAD + _WEIGHT, self._merged(_HEAD, tensor)
            left.discard(module)
            yield name, self._merged(module, tensor) if name.endswith(_WEIGHT) else tensor
        for module in left:
            raise self.found.error(self.modules[module], "the checkpoint has no weight of this module")

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a module's weight [N, K], or that of an embedding [V, D], as the adapter makes it."""
        found, module = self.found, self.modules.get(name)
        if module is None:
            return weight
        if found.has(module, "weight"):
            return found.tensor(module, "weight", tuple(weight.shape)).to(weight.dtype)
        rank, (rows, columns) = found.config.rank_of(module), weight.shape
        if found.has(module, "embedding_down", "embedding_up"):
            down = found.tensor(module, "embedding_down", (rank, rows))
            added = (found.tensor(module, "embedding_up", (columns, rank)).float() @ down.float()).T
        else:
            down = found.tensor(module, "down", (rank, columns))
            added = found.tensor(module, "up", (rows, rank)).float() @ down.float()
        return (weight.float() + found.config.scale_of(module) * added).to(weight.dtype)


def merge_lora(checkpoint: Checkpoint, folder: Path) -> MergedCheckpoint:
    """Merge the adapter in a folder into a checkpoint with dense weights."""
    if checkpoint.model.quantization is not None:
        method = checkpoint.model.quantization.method
        limit = f"for dense weights; these are quantized (quant_method {method})"
        raise InvalidParameterError("merge_lora", str(folder), limit)
    check_adapter(checkpoint.model, folder, checkpoint.load_format)
    found, model = AdapterTensors(folder), empty_model(checkpoint.model)
    modules = {renamed(model, module): module for module in found.by_module}
    touched = {_EMBEDDING, _HEAD} & modules.keys()
    unties_head = checkpoint.model.tie_word_embeddings and bool(touched)
    changed = {"tie_word_embeddings": False} if unties_head else {}
    return MergedCheckpoint(
        path=checkpoint.path,
        model=replace(checkpoint.model, tie_word_embeddings=False) if unties_head else checkpoint.model,
        settings={**checkpoint.settings, **changed},
        load_format=checkpoint.load_format,
        dtype=checkpoint.dtype,
        found=found,
        modules=modules,
        unties_head=unties_head,
    )
