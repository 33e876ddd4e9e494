"""Loads the weights of a GGUF file, renamed and reordered to match other checkpoints.

A tensor whose layer computes with blocks (`layers/quant/gguf.py`) is passed on as it is in the file; others are
dequantized here. The order of rotary dimensions follows llama.cpp's converter.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.gguf.decoding import check_decoder
from octavo.gguf.file import GgufFile, GgufTensor
from octavo.gguf.names import IGNORED, TensorNames
from octavo.kernels.blocks import dequantize
from octavo.loader.base import ModelLoader
from octavo.loader.gguf_heads import as_in_checkpoints, linear_attention_spec
from octavo.loader.read_ahead import ReadAhead
from octavo.models.interfaces import CausalLM
from octavo.models.weights import OtherStages, WeightSlot, weight_slots

logger = logging.getLogger(__name__)


class LatentHeads:
    """Heads' linears of a latent vector, of which newer files have keys, transposed, and values apart.

    Legend: H = heads, R = rank of the vector, N = size of a head's key made of it, V = of its value.
    """

    parts = ("attn_k_b", "attn_v_b")

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Tensor]] = {}

    def joined(self, part: str, name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole [H * (N + V), R] once both parts are there: keys [H, R, N], values [H, V, R]."""
        stem = name.rpartition("self_attn.")[0] + "self_attn."
        found = self._found.setdefault(stem, {})
        found[part] = values
        if len(found) == len(self.parts):
            keys, values = (self._found[stem][each] for each in self.parts)
            del self._found[stem]
            yield f"{stem}kv_b_proj.weight", torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


_MAPPED_BYTES = 64 << 20  # read until pages are given back


class GgufLoader(ModelLoader):
    """Reads the file at `model_config.path`."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
        """See `ModelLoader.tensors`. Tensors are mapped, or dequantized one at a time."""
        path, elsewhere = Path(model.config.path), OtherStages(model)
        if not path.is_file():
            raise CheckpointError(f"{path} is a folder; load_format='gguf' reads a file")
        facts, slots = model.family.gguf, weight_slots(model)
        assert facts is not None, f"{model.config.architecture} has GGUF files"
        names, file = TensorNames(path, facts.names), GgufFile.read(path)
        self._look_at_decoded(file)
        num_read, ahead = 0, ReadAhead(file.paths)
        heads = LatentHeads()
        for tensor in file.tensors.values():
            if tensor.name in IGNORED:
                continue
            part, wanted = names.translate(tensor)
            if all(name in elsewhere for name in wanted):
                continue
            has_blocks = any(name in slots and slots[name].spec.is_integer for name in wanted)
            values = torch.from_numpy(tensor.data) if has_blocks else self.numbers(tensor)
            is_weight = tensor.name.endswith(".weight")
            values = _as_in_checkpoints(part, values, model, has_blocks=has_blocks, is_weight=is_weight)
            if part in heads.parts:
                yield from heads.joined(part, wanted[0], values)
            else:
                yield from zip(wanted, self._parts(tensor, values, [slots.get(name) for name in wanted]), strict=True)
            ahead.used(tensor.data.nbytes)
            num_read += tensor.data.nbytes
            if num_read > _MAPPED_BYTES:
                file.release_pages()
                num_read = 0

    def _look_at_decoded(self, file: GgufFile) -> None:
        """Say which tensors become floats, and how much memory that takes; raise where nothing can decode them."""
        decoded = [tensor for tensor in file.tensors.values() if tensor.type.is_decoded]
        kinds = {tensor.type.name: tensor.type for tensor in decoded}
        check_decoder(file.path, kinds.values())
        if kinds:
            grows = sum(2 * math.prod(each.shape) - each.data.nbytes for each in decoded) / 1e9
            what = f"{len(decoded)} tensors ({', '.join(sorted(kinds))}) are decoded to floats"
            less = f"{grows:.1f} GB more than in the file in 16 bits, less with --quantization int8 or int4"
            logger.warning("%s: %s: %s", file.path, what, less)

    def _parts(self, tensor: GgufTensor, values: Tensor, slots: list[WeightSlot | None]) -> Sequence[Tensor]:
        """Cut a tensor into what its names stand for: experts, rows of several parts, or both."""
        if len(slots) == 1:
            return [values]
        is_bias = tensor.name.endswith(".bias")
        if len(tensor.shape) == (2 if is_bias else 3):  # experts, each of them with all parts
            return list(values.reshape(len(slots), -1, *(() if is_bias else values.shape[-1:])))
        sizes = [0 if slot is None else slot.spec.shape[0] for slot in slots]
        if sum(sizes) != len(values):
            raise CheckpointError(f"{tensor.name!r}: {sum(sizes)} rows are expected, found {len(values)}")
        return torch.split(values, sizes)

    def numbers(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor's values in its shape."""
        return dequantize(tensor_rows(tensor), tensor.type).view(tensor.shape)


def tensor_rows(tensor: GgufTensor) -> Tensor:
    """Return a tensor's bytes, [N, bytes of a row]."""
    return torch.from_numpy(tensor.data).view(-1, tensor.data.shape[-1])


def _as_in_checkpoints(part: str, values: Tensor, model: CausalLM, *, has_blocks: bool, is_weight: bool) -> Tensor:
    """Return a tensor as checkpoints have it; `part` is its name in a block of the file."""
    config, facts = model.config, model.family.gguf
    assert facts is not None, "the family has GGUF files"
    if part == "ssm_a":  # minus the rates of forgetting, whose logarithms checkpoints have
        values = torch.log(-values)
    if (linear := linear_attention_spec(config)) is not None:
        values = as_in_checkpoints(part, values, linear, has_blocks=has_blocks)
    has_offset = is_weight and part.endswith("norm") and part not in ("ssm_norm", *facts.stored_norms)
    if has_offset and config.norm_offset:  # files have whole factors
        values = values - config.norm_offset
    if part in ("attn_q", "attn_k") and facts.interleaves_rows:
        # Of each head, interleaved pairs become halves: all first elements, then all second ones.
        spec = config.attending[0]
        num_heads = spec.num_heads if part == "attn_q" else spec.num_kv_heads
        pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
        values = pairs.transpose(1, 2).reshape(values.shape)
    return values
