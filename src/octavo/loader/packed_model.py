"""Saves and restores a whole model in the cache of packed weights."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.config.engine import LoadConfig
from octavo.kernels.types import KeepsPacked
from octavo.layers.table_in_file import TableInFile
from octavo.layers.weight_owner import WeightOwner
from octavo.loader.packed_cache import PackedCache, cache_folder, checkpoint_digest
from octavo.models.interfaces import CausalLM
from octavo.models.weights import weight_slots

logger = logging.getLogger(__name__)

_WORTH_KEEPING_BYTES = 64 << 20  # less is packed faster than found
_FORM = 3  # version of file names and contents, apart from the kernels' layout


class PackedModel:
    """The packed form of one model, on disk or in its layers."""

    def __init__(self, model: CausalLM, cache: PackedCache, digest: str) -> None:
        self._model, self._cache, self._digest = model, cache, digest

    @classmethod
    def of(cls, model: CausalLM, load_config: LoadConfig) -> "PackedModel | None":
        """Return None if nothing can be cached: it is disabled, or these kernels do not expose their layout."""
        kernels = model.context.kernels
        if load_config.packed_cache_bytes == 0 or not isinstance(kernels, KeepsPacked):
            return None
        if load_config.tensorizer_uri is not None:  # may change without a trace in the model's folder
            return None
        tensor, experts = model.context.groups.tensor, model.context.groups.experts
        slots = {  # of this rank's stage
            name: (slot.spec.shape, slot.owner.layout) for name, slot in weight_slots(model).items()
        }
        digest = checkpoint_digest(
            Path(model.config.path), _FORM, kernels.layout, tensor.rank, tensor.size, experts.size, slots
        )
        return cls(model, PackedCache(cache_folder(), load_config.packed_cache_bytes), digest)

    def restore(self) -> bool:
        """Restore every layer from the file. Returns False if there is none; nothing has changed then."""
        tensors = self._cache.find(self._digest)
        if tensors is None:
            return False
        by_owner: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            path, _, own_name = name.partition("/")
            by_owner[path][own_name] = tensor
        for path, owner in _owners(self._model):
            owner.adopt_packed(by_owner[path])
        self._model.mapped_bytes = sum(tensor.nbytes for tensor in tensors.values()) - self._model.bytes_in_file
        return True

    def keep(self) -> None:
        """Save the layers' packed weights, unless they are small or one of them cannot be saved."""
        tensors: dict[str, torch.Tensor | TableInFile] = {}
        for path, owner in _owners(self._model):
            packed = owner.packed_tensors()
            if packed is None:
                logger.debug("packed weights are not kept on disk: %s cannot be", path)
                return
            tensors.update({f"{path}/{name}": tensor for name, tensor in packed.items()})
        if sum(tensor.nbytes for tensor in tensors.values()) >= _WORTH_KEEPING_BYTES:
            self._cache.keep_soon(self._digest, tensors)


def _owners(model: CausalLM) -> Iterator[tuple[str, WeightOwner]]:
    for path, module in model.named_modules():
        if isinstance(module, WeightOwner):
            yield path, module
