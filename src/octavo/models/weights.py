"""Loads checkpoint tensors into a model, whatever their file format."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from octavo.errors import CheckpointError
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner
from octavo.models.interfaces import CausalLM

logger = logging.getLogger(__name__)

# Tensors without effect on text, and why: scales of queries, keys and values in 8 bits, as vLLM, LLM Compressor and
# ModelOpt name them; what TRL adds to models trained with PPO.
_UNUSED = {
    re.compile(r"(_attn(\.attn)?|\.[qkv]_proj|\.qkv_proj)\.([qkv]|kv|prob|output)_(scale|zero_point)$"): (
        "keys and values are kept in the dtype that kv_cache_dtype says"
    ),
    re.compile(r"^v_head\."): "a value head rates text, it writes none",
}
# What training leaves in names: modules that wrap the model (DDP, PEFT), or a part of it (torch.compile, FSDP).
_WRAPPERS = re.compile(
    r"^(module\.|base_model\.model\.)+"
    r"|(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.(module\.|base_model\.model\.)?"
)
_FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_FLOAT8_DTYPES = frozenset({torch.float8_e4m3fn})
_INTEGER_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlot:
    """The place of one checkpoint tensor in the model."""

    owner: WeightOwner
    name: str  # the owner's own name for it, e.g. "q.weight"
    spec: TensorSpec


class OtherStages:
    """The checkpoint tensors that only other stages and other models use: `name in OtherStages(model)`."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        stems = {template.partition("{layer}")[0] for template in model.weight_targets if "{layer}" in template}
        others = set(range(model.config.num_layers)).difference(model.stage.layers)
        self._stems = tuple(f"{stem}{layer}." for stem in stems for layer in others)
        self._layers = {name for name, target in model.weight_targets.items() if target in model.parts_on_other_ranks}

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, str)
        is_on_other_stage = name.startswith(self._stems) or name.rpartition(".")[0] in self._layers
        return is_on_other_stage or self._model.leaves_out(name)


def weight_slots(model: CausalLM) -> dict[str, WeightSlot]:
    """Return every checkpoint tensor that this stage requires, by name, in model order."""
    slots: dict[str, WeightSlot] = {}
    for template, target in model.weight_targets.items():
        if target in model.parts_on_other_ranks:
            continue
        for numbers in numbers_in(template + target, model.stage.layers, model.num_experts):
            slots.update(_slots_of_row(model, template.format(**numbers), target.format(**numbers)))
    return slots


def load_weights(model: CausalLM, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Pass tensors to the layers that own them; a layer packs them at once, so that their source can be freed."""
    for owner, its_tensors in tensors_by_owner(model, tensors):
        for name, tensor in its_tensors.items():
            owner.load_weight(name, tensor)
        owner.process_weights_after_loading()


def tensors_by_owner(
    model: CausalLM, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[WeightOwner, dict[str, torch.Tensor]]]:
    """Yield each layer with its tensors, by its own names for them, as soon as it has them all.

    A checkpoint may contain an all-zero bias, which has no effect, for a layer without one.
    """
    slots, elsewhere = weight_slots(model), OtherStages(model)
    missing = dict(slots)
    num_missing = Counter(slot.owner for slot in slots.values())
    found: dict[WeightOwner, dict[str, torch.Tensor]] = defaultdict(dict)
    without_bias = {f"{name.rpartition('.')[0]}.bias" for name in slots}.difference(slots)
    unused: dict[str, list[str]] = {}
    for name, tensor in spelt_as_in_table(model, tensors):
        if name not in slots:
            if why := next((why for pattern, why in _UNUSED.items() if pattern.search(name)), None):
                unused.setdefault(why, []).append(name)
                continue
            is_nothing = name in without_bias and not tensor.any()
            if is_nothing or model.ignores_weight(name) or name in elsewhere:
                continue
            raise CheckpointError(f"{model.config.path}: tensor {name!r} has no place in {model.config.architecture}")
        _check_tensor(model, name, tensor, slots[name].spec)
        if missing.pop(name, None) is None:
            raise CheckpointError(f"{model.config.path}: tensor {name!r} is given twice")
        owner = slots[name].owner
        found[owner][slots[name].name] = tensor
        num_missing[owner] -= 1
        if not num_missing[owner]:
            yield owner, found.pop(owner)
    if required := [(name, slot.spec.shape) for name, slot in missing.items() if slot.spec.is_required]:
        (name, shape), others = required[0], f" (and {len(required) - 1} more)" if len(required) > 1 else ""
        raise CheckpointError(f"{model.config.path}: tensor {name!r} of shape {list(shape)} is missing{others}")
    if model.stage.is_first and model.context.groups.tensor.rank == 0:
        for why, names in unused.items():
            logger.warning("%s: %d tensors such as %s are not used: %s", model.config.path, len(names), names[0], why)
    yield from found.items()  # without tensors that are not required


def process_weights_after_loading(model: CausalLM) -> None:
    """Let every layer pack its weights, one after the other: only one layer at a time is in memory twice."""
    for module in model.modules():
        if isinstance(module, WeightOwner):
            module.process_weights_after_loading()


def numbers_in(template: str, layers: range, num_experts: int) -> Iterator[dict[str, int]]:
    """Yield the values of a name's placeholders."""
    values = {"layer": layers, "expert": range(num_experts)}
    used = {name: numbers for name, numbers in values.items() if "{" + name + "}" in template}
    for numbers in product(*used.values()):
        yield dict(zip(used, numbers, strict=True))


def spelt_as_in_table(
    model: CausalLM, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split tensors with alternative names into views under the names of the model's table; of twins, yield one."""
    others = {
        template.format(**numbers): [name.replace("{layer}", str(numbers.get("layer"))) for name in names]
        for template, names in model.other_spellings.items()
        for numbers in numbers_in(template, model.stage.layers, model.num_experts)
    } | {name: list(parts) for name, parts in model.split_tensors.items()}
    spelling_of_twin: dict[str, str] = {}
    slots: dict[str, WeightSlot] = {}  # if asked for
    for found, tensor in model.laid_out((renamed(model, original), tensor) for original, tensor in tensors):
        name = model.twins.get(found, found)
        if name != found and tensor.shape[:1] != (model.config.vocab_size,):
            continue  # `config/checkpoint_files.py` has warned of it
        if spelling_of_twin.setdefault(name, found) != found:
            continue
        if name not in others:
            yield name, tensor
        elif "{expert}" in others[name][0]:
            yield from _unstacked(model, name, tensor, others[name])
        else:
            slots = slots or weight_slots(model)
            yield from zip(others[name], _cut(f"{model.config.path}: {name}", tensor, others[name], slots), strict=True)


def _cut(
    origin: str, tensor: torch.Tensor, parts: list[str], slots: Mapping[str, WeightSlot]
) -> Sequence[torch.Tensor]:
    """Cut a tensor into its parts' rows: as many as each has, or as many of each where the model does not say it."""
    if not all(part in slots and len(slots[part].spec.shape) == tensor.dim() for part in parts):
        return tensor.chunk(len(parts))
    sizes = [slots[part].spec.shape[0] for part in parts]
    if sum(sizes) != len(tensor):
        why = f"{sum(sizes)} rows are expected, those of {', '.join(parts)}; found {len(tensor)}"
        raise CheckpointError(f"{origin}: {why}")
    return torch.split(tensor, sizes)


def renamed(model: CausalLM, name: str) -> str:
    """Return the name that the model's table has for a checkpoint's tensor or module."""
    return model.name_in_table(_WRAPPERS.sub("", name))


def _unstacked(model: CausalLM, name: str, stack: torch.Tensor, parts: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    if stack.dim() != 3 or len(stack) != model.num_experts or stack.shape[1] % len(parts):
        why = f"a stack of {model.num_experts} experts is expected, found {list(stack.shape)}"
        raise CheckpointError(f"{model.config.path}: tensor {name!r}: {why}")
    for expert, rows in enumerate(stack):
        for part, weight in zip(parts, rows.chunk(len(parts)), strict=True):
            yield part.format(expert=expert), weight


def _slots_of_row(model: CausalLM, checkpoint_name: str, target: str) -> Iterator[tuple[str, WeightSlot]]:
    path, _, part = target.partition(":")
    owner = find_part(model, path)
    if owner is None:
        return
    assert isinstance(owner, WeightOwner), f"{path} owns no weights"
    for name, spec in owner.checkpoint_tensors().items():
        owner_part, _, parameter = name.rpartition(".")
        if owner_part == part:
            yield f"{checkpoint_name}.{parameter}", WeightSlot(owner=owner, name=name, spec=spec)


def find_part(model: CausalLM, path: str) -> nn.Module | None:
    """Return a part of the model, or None: a layer has either a plain MLP or experts."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _check_tensor(model: CausalLM, name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
    if tuple(tensor.shape) not in (spec.shape, *spec.other_shapes):
        shapes = f"shape {list(spec.shape)} is expected, found {list(tensor.shape)}"
        raise CheckpointError(f"{model.config.path}: tensor {name!r}: {shapes}")
    floats = _FLOAT8_DTYPES if spec.is_float8 else _FLOAT_DTYPES
    if tensor.dtype not in (_INTEGER_DTYPES if spec.is_integer else floats):
        raise CheckpointError(f"{model.config.path}: tensor {name!r}: dtype {tensor.dtype} cannot be loaded as weights")
