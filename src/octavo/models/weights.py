"""The one loop that brings tensors of a checkpoint into a model, whatever their format."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from octavo.errors import CheckpointError
from octavo.layers.weight_owner import WeightOwner
from octavo.models.interfaces import CausalLM

_LOADABLE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlot:
    """The place in the model of one tensor of the checkpoint."""

    owner: WeightOwner
    name: str  # the owner's own name for it, e.g. "q.weight"
    shape: tuple[int, ...]


def weight_slots(model: CausalLM) -> dict[str, WeightSlot]:
    """Return every tensor that a checkpoint must bring, by its name there, in the order of the model."""
    slots: dict[str, WeightSlot] = {}
    for template, target in model.weight_names.items():
        for layer in range(model.num_layers) if "{layer}" in template else range(1):
            slots.update(_slots_of_row(model, template.format(layer=layer), target.format(layer=layer)))
    return slots


def load_weights(model: CausalLM, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give each tensor to the layer that owns it, and see that none was left out.

    A layer that has all its tensors packs them at once: what they were read from may go.

    Raises:
        CheckpointError: a tensor that is missing, unknown, of the wrong shape or of a dtype that holds no weights.
    """
    slots = weight_slots(model)
    missing = dict(slots)
    num_missing = Counter(slot.owner for slot in slots.values())
    for name, tensor in tensors:
        if name not in slots:
            if model.ignores_weight(name):
                continue
            raise CheckpointError(f"{model.config.path}: tensor {name!r} has no place in {model.config.architecture}")
        _check_tensor(model, name, tensor, slots[name].shape)
        owner = slots[name].owner
        owner.load_weight(slots[name].name, tensor)
        if missing.pop(name, None) is not None:
            num_missing[owner] -= 1
            if not num_missing[owner]:
                owner.process_weights_after_loading()
    _check_complete(model, missing)


def process_weights_after_loading(model: CausalLM) -> None:
    """Let every layer convert and pack what it owns, one after the other: only one layer is held twice at a time."""
    for module in model.modules():
        if isinstance(module, WeightOwner):
            module.process_weights_after_loading()


def _slots_of_row(model: CausalLM, checkpoint_name: str, target: str) -> Iterator[tuple[str, WeightSlot]]:
    path, _, part = target.partition(":")
    owner = model.get_submodule(path)
    assert isinstance(owner, WeightOwner), f"{path} owns no weights"
    for name, shape in owner.weight_shapes().items():
        owner_part, _, parameter = name.rpartition(".")
        if owner_part == part:
            yield f"{checkpoint_name}.{parameter}", WeightSlot(owner=owner, name=name, shape=shape)


def _check_tensor(model: CausalLM, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        found = list(tensor.shape)
        raise CheckpointError(f"{model.config.path}: tensor {name!r}: shape {list(shape)} is expected, found {found}")
    if tensor.dtype not in _LOADABLE_DTYPES:
        raise CheckpointError(f"{model.config.path}: tensor {name!r}: dtype {tensor.dtype} cannot be loaded as weights")


def _check_complete(model: CausalLM, missing: dict[str, WeightSlot]) -> None:
    if not missing:
        return
    name, slot = next(iter(missing.items()))
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    raise CheckpointError(f"{model.config.path}: tensor {name!r} of shape {list(slot.shape)} is missing{others}")
