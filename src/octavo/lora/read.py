"""Reads an adapter's files for one rank of a model, and checks every tensor against it.

Legend: r = rank, V = vocabulary, D = hidden size.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from octavo.errors import AdapterError
from octavo.layers.linear import MergedLinear
from octavo.loader.safetensors import read_file
from octavo.loader.torch_pt import read_state_dict
from octavo.lora.adapter_config import AdapterConfig, read_adapter_config
from octavo.lora.folder import SAFETENSORS_FILE, weights_file
from octavo.lora.names import AdapterTensorName, TensorKind
from octavo.lora.rank_adapter import LayerAdapter, LowRank, RankAdapter
from octavo.lora.targets import AdapterTargets, Target

_FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class AdapterReader:
    """Reads adapters of ranks up to `max_rank` for the layers of one rank, which compute in `dtype`."""

    def __init__(self, targets: AdapterTargets, max_rank: int, dtype: torch.dtype) -> None:
        self._targets, self._max_rank, self._dtype = targets, max_rank, dtype

    def read(self, folder: Path) -> RankAdapter:
        """Read the adapter in a folder.

        Raises:
            CheckpointError: a file is missing, truncated or malformed, or asks for code to be run.
            AdapterError: an adapter of a kind that is not supported, or one that does not fit the model; names the
                setting or the tensor.
        """
        config, found = read_adapter_config(folder), _Found(str(weights_file(folder)))
        for name, tensor in _tensors(folder):
            found.add(name, tensor)
        by_layer: dict[str, dict[str, LowRank]] = defaultdict(dict)
        layers: dict[str, MergedLinear] = {}
        for module in found.by_module:
            if (target := self._target(found, module)) is not None:
                assert isinstance(target.layer, MergedLinear)
                by_layer[target.path][target.part] = self._low_rank(found, config, module, target.layer, target.part)
                layers[target.path] = target.layer
        adapters = {path: LayerAdapter.of(layers[path], parts, self._dtype) for path, parts in by_layer.items()}
        _check_finite(found.path, adapters)
        return RankAdapter(layers=adapters)

    def _target(self, found: "_Found", module: str) -> Target | None:
        try:
            return self._targets.find(module)
        except AdapterError as error:
            raise found.error(next(iter(found.by_module[module])), module, str(error)) from None

    def _low_rank(self, found: "_Found", config: AdapterConfig, module: str, layer: MergedLinear, part: str) -> LowRank:
        rank, outputs = config.rank_of(module), layer.parts[part]
        if rank > self._max_rank:
            raise found.error("down", module, f"rank {rank} exceeds max_lora_rank={self._max_rank}")
        down = found.tensor(module, "down", (rank, layer.inputs.total))
        up = found.tensor(module, "up", (outputs.total, rank))
        return LowRank(down=down, up=up, scale=config.scale_of(module))


class _Found:
    """The tensors of a file, by module. Errors name the file and the tensor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.by_module: dict[str, dict[TensorKind, torch.Tensor]] = defaultdict(dict)
        self._names: dict[tuple[str, TensorKind], str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        try:
            of = AdapterTensorName.of(name)
        except AdapterError as error:
            raise AdapterError(f"{self.path}: {error}") from None
        if of.kind in self.by_module[of.module]:
            raise AdapterError(f"{self.path}: tensor {name!r} is given twice")
        if tensor.dtype not in _FLOAT_DTYPES:
            raise AdapterError(f"{self.path}: tensor {name!r}: {tensor.dtype} cannot be an adapter's weights")
        self.by_module[of.module][of.kind], self._names[of.module, of.kind] = tensor, name

    def tensor(self, module: str, kind: TensorKind, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a module's tensor of this kind and shape."""
        tensor = self.by_module[module].get(kind)
        if tensor is None:
            other = next(iter(self.by_module[module]))
            raise self.error(other, module, f"the {kind} projection that belongs to it is missing")
        if tuple(tensor.shape) != shape:
            raise self.error(kind, module, f"shape {list(shape)} is expected, found {list(tensor.shape)}")
        return tensor

    def error(self, kind: TensorKind, module: str, why: str) -> AdapterError:
        return AdapterError(f"{self.path}: tensor {self._names[module, kind]!r}: {why}")


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    path = weights_file(folder)
    if path.name == SAFETENSORS_FILE:
        yield from read_file(path, elsewhere=())
    else:
        yield from read_state_dict(path).items()


def _check_finite(path: str, adapters: Mapping[str, LayerAdapter]) -> None:
    """Refuse an adapter whose tokens would only ever be errors."""
    for layer, adapter in adapters.items():
        if not all(tensor.isfinite().all() for tensor in adapter.tensors):
            raise AdapterError(f"{path}: the adapter of {layer} has values that are not finite in {adapter.up.dtype}")
