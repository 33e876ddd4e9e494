"""`ModelLoader`: builds a model empty, loads its weights and packs them. Formats differ in where tensors come from."""

import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from octavo.config.engine import LoadConfig
from octavo.config.model import ModelConfig
from octavo.errors import InvalidParameterError
from octavo.layers.context import BuildContext
from octavo.loader.packed_cache import PackedModel
from octavo.models.interfaces import CausalLM
from octavo.models.registry import initialize_model
from octavo.models.weights import load_weights, process_weights_after_loading, weight_slots

logger = logging.getLogger(__name__)

_FOLDER_FORMATS = ("safetensors", "pt", "sharded_state")
_BAR_AFTER_S = 0.5
_PART_BYTES = 32 << 20  # per pinned buffer; a few are in flight


class ModelLoader(ABC):
    """One weight format."""

    reads_files: ClassVar[bool] = True

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the checkpoint, tensor), each once. Tensors stay unchanged until the model is packed."""

    def load_model(self, model_config: ModelConfig, context: BuildContext) -> CausalLM:
        """Return the model, ready to compute."""
        return self.load(initialize_model(model_config, context))

    def load(self, model: CausalLM) -> CausalLM:
        """Load the weights of an empty model."""
        start, model_config = time.monotonic(), model.config
        if self.load_config.load_format in _FOLDER_FORMATS and Path(model_config.path).is_file():
            limit = f"auto or gguf: {model_config.path} is a GGUF file"
            raise InvalidParameterError("load_format", self.load_config.load_format, limit)
        packed = PackedModel.of(model, self.load_config) if self.reads_files else None
        is_restored = packed is not None and packed.restore()
        if not is_restored:
            self.fill(model)
            process_weights_after_loading(model)
        took_s, how = time.monotonic() - start, "mapped in, packed as they were" if is_restored else "loaded"
        logger.info("%s (%s): weights %s in %.2f s", model_config.model, model_config.architecture, how, took_s)
        if packed is not None and not is_restored:
            packed.keep()
        return model.eval()

    def fill(self, model: CausalLM) -> None:
        """Pass the weights to the layers of a model."""
        context, tensors = model.context, self.tensors(model)
        is_whole = context.groups.tensor.size == context.groups.experts.size == 1  # else a rank reads only its shard
        if context.device.type == "cuda" and is_whole:
            tensors = staged(tensors, context.device)
        load_weights(model, _shown(tensors, model))


def _shown(tensors: Iterator[tuple[str, torch.Tensor]], model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same, with a bar of progress on a terminal, one for all ranks, when it takes a while."""
    if not (sys.stderr.isatty() and model.stage.is_first and model.context.groups.tensor.rank == 0):
        yield from tensors
        return
    from tqdm import tqdm  # a machine without a terminal can do without

    total = sum(math.prod(slot.spec.shape) for slot in weight_slots(model).values())
    with tqdm(total=total, desc="Weights", unit="", unit_scale=True, delay=_BAR_AFTER_S, leave=False) as bar:
        for name, tensor in tensors:
            yield name, tensor
            bar.update(tensor.numel())


def staged(
    tensors: Iterator[tuple[str, torch.Tensor]],
    device: torch.device,
    host_bytes: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same names and tensors, on the device, through pinned memory: reading a file and copying overlap.

    From pageable memory, the driver copies synchronously through a small buffer of its own. Copies may be in flight;
    later launches are ordered after them. `host_bytes` allocates uint8 [n] of host memory, released when it is
    unreferenced and its copies are done; by default torch's pinned memory.
    """
    for name, tensor in tensors:
        yield name, _send(tensor, device, host_bytes or partial(torch.empty, dtype=torch.uint8, pin_memory=True))


def _send(tensor: torch.Tensor, device: torch.device, host_bytes: Callable[[int], torch.Tensor]) -> torch.Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return tensor.to(device)
    on_device = torch.empty_like(tensor, device=device)
    source, target = (each.view(-1).view(torch.uint8) for each in (tensor, on_device))
    for part, place in zip(torch.split(source, _PART_BYTES), torch.split(target, _PART_BYTES), strict=True):
        host = host_bytes(_PART_BYTES)[: len(part)]
        host.copy_(part)
        place.copy_(host, non_blocking=True)
    return on_device
