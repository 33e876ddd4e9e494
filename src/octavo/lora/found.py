"""The tensors of an adapter's file by module, with errors that name the file and the tensor."""

from collections import defaultdict

import torch

from octavo.errors import AdapterError
from octavo.lora.names import AdapterTensorName, TensorKind

_FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class FoundTensors:
    """What was read from one file. Modules have the names of the base model's checkpoint."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.by_module: dict[str, dict[TensorKind, torch.Tensor]] = defaultdict(dict)
        self._names: dict[tuple[str, TensorKind], str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor.

        Raises:
            AdapterError: its name or dtype is not that of an adapter's tensor.
        """
        try:
            of = AdapterTensorName.of(name)
        except AdapterError as error:
            raise AdapterError(f"{self._path}: {error}") from None
        if of.kind in self.by_module[of.module]:
            raise AdapterError(f"{self._path}: tensor {name!r} is given twice")
        if tensor.dtype not in _FLOAT_DTYPES:
            raise AdapterError(f"{self._path}: tensor {name!r}: {tensor.dtype} cannot be an adapter's weights")
        self.by_module[of.module][of.kind], self._names[of.module, of.kind] = tensor, name

    def has(self, module: str, *kinds: TensorKind) -> bool:
        """Return whether a module has a tensor of any of these kinds."""
        return not self.by_module[module].keys().isdisjoint(kinds)

    def tensor(self, module: str, kind: TensorKind, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a module's tensor of this kind.

        Raises:
            AdapterError: it is missing, of another shape, or has values that are not finite.
        """
        tensor = self.by_module[module].get(kind)
        if tensor is None:
            raise self.error(module, f"{kind} of {list(shape)} that belongs to it is missing")
        if tuple(tensor.shape) != shape:
            raise self.error(module, f"shape {list(shape)} is expected, found {list(tensor.shape)}", kind)
        if not tensor.isfinite().all():
            raise self.error(module, "has values that are not finite, so that its tokens would all be errors", kind)
        return tensor

    def allow(self, module: str, kinds: frozenset[TensorKind], what: str) -> None:
        """Check that a module has tensors of these kinds only; `what` it is goes into the message.

        Raises:
            AdapterError: the module has another one.
        """
        for kind in self.by_module[module]:
            if kind not in kinds:
                raise self.error(module, f"{kind} does not belong to {what}; known: {', '.join(sorted(kinds))}", kind)

    def error(self, module: str, why: str, kind: TensorKind | None = None) -> AdapterError:
        """Return an error about a module's tensor, by default the first."""
        of_kind = next(iter(self.by_module[module])) if kind is None else kind
        return AdapterError(f"{self._path}: tensor {self._names[module, of_kind]!r}: {why}")
