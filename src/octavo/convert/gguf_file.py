"""Target `gguf`: one file for llama.cpp and programs based on it, written by ggml's own library.

Names, the order of rotary dimensions and keys are those of llama.cpp's converter; `config/gguf.py` and `loader/gguf.py`
read such files.
"""

import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.config import families
from octavo.config.family import GgufFacts
from octavo.convert.gguf_metadata import write_settings, write_special_ids, write_tokenizer
from octavo.convert.source import SINGLE_FILES, Checkpoint, TargetOptions, import_library
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.layers.rotary import inverse_frequencies
from octavo.models.interfaces import CausalLM
from octavo.models.weights import spelt_as_in_table
from octavo.tokenizer.files import read_tokenizer_files
from octavo.worker.memory import empty_model

logger = logging.getLogger(__name__)

_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WRITTEN_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # that the library quantizes to
_EXPERT = re.compile(r"model\.layers\.(?P<layer>\d+)\..*experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")


def write_gguf(checkpoint: Checkpoint, out: Path, options: TargetOptions) -> None:
    """Write model.gguf: settings, tokenizer, chat template and tensors; matrices are of type `options.gguf_type`."""
    model, library = checkpoint.written_model, import_library("gguf", "gguf")
    kind = options.gguf_type or _TYPES[model.dtype]
    if model.quantization is not None:
        why = f"weights are quantized (quant_method {model.quantization.method}); use the original"
        raise UnsupportedModelError(f"{checkpoint.path}: cannot be written as gguf: {why}")
    facts = families.FAMILIES[model.architecture].gguf
    if facts is None or not facts.is_written:
        known = (name for name, family in families.FAMILIES.items() if family.gguf and family.gguf.is_written)
        why = f"{model.architecture}; known: {', '.join(known)}"
        raise UnsupportedModelError(f"{checkpoint.path}: cannot be written as gguf: {why}")
    if kind not in _WRITTEN_TYPES:
        raise InvalidParameterError("gguf_type", kind, "one of " + ", ".join(_WRITTEN_TYPES))
    writer = library.GGUFWriter(out / SINGLE_FILES["gguf"], facts.architecture)
    write_settings(writer, library, model)
    has_tokenizer = checkpoint.path.is_file() or (checkpoint.path / "tokenizer.json").is_file()
    files = read_tokenizer_files(checkpoint.path) if has_tokenizer else None
    write_special_ids(writer, files, model)
    if files is None:
        logger.warning("%s has no tokenizer.json: none is written", checkpoint.path)
    else:
        write_tokenizer(writer, files, model, str(checkpoint.path))
    _Tensors(checkpoint, library, facts, library.GGMLQuantizationType[kind]).write(writer)
    writer.close()


class _Tensors:
    """The tensors of a checkpoint under ggml's names, in ggml's order of rows."""

    def __init__(self, checkpoint: Checkpoint, library: Any, facts: GgufFacts, matrix_type: Any) -> None:
        self._checkpoint, self._library, self._matrix_type = checkpoint, library, matrix_type
        model, arch = checkpoint.model, library.MODEL_ARCH_NAMES
        kind = next(key for key, name in arch.items() if name == facts.architecture)
        self._names = library.get_tensor_name_map(kind, model.num_layers)
        spec = model.attention(0)
        self._heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads} if facts.interleaves_rows else {}
        self._model: CausalLM = empty_model(model)

    def write(self, writer: Any) -> None:
        """Write all tensors: first their descriptions, then their values, one at a time."""
        for name, tensor in self._renamed(torch.device("meta")):
            kind = self._type_of(name, tensor)
            shape = self._library.quant_shape_to_byte_shape(tensor.shape, kind)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in self._renamed(torch.device("cpu")):
            kind = self._type_of(name, tensor)
            if kind.name in _FLOATS:
                values = tensor.to(_FLOATS[kind.name]).contiguous().view(torch.uint8).numpy()
            else:
                values = import_library("gguf.quants", "gguf").quantize(tensor.float().contiguous().numpy(), kind)
            writer.write_tensor_data(values)

    def _type_of(self, name: str, tensor: torch.Tensor) -> Any:
        is_matrix = tensor.dim() > 1 and not name.split(".")[-2].startswith(_ROUTERS)
        kind = self._matrix_type if is_matrix else self._library.GGMLQuantizationType.F32
        if tensor.shape[-1] % self._library.GGML_QUANT_SIZES[kind][0]:
            why = f"rows of {tensor.shape[-1]} do not fill its blocks"
            raise UnsupportedModelError(f"tensor {name!r} cannot be of type {kind.name}: {why}")
        return kind

    def _renamed(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ggml's names and tensors; on the meta device, without their values."""
        experts: dict[str, dict[int, torch.Tensor]] = {}
        tensors = ((name, tensor.to(device)) for name, tensor in self._checkpoint.tensors())
        for name, tensor in spelt_as_in_table(self._model, tensors):
            if self._model.ignores_weight(name):
                continue
            if found := _EXPERT.fullmatch(name):
                stacked = f"blk.{found['layer']}.ffn_{_EXPERT_PARTS[found['part']]}_exps.weight"
                parts = experts.setdefault(stacked, {})
                parts[int(found["expert"])] = tensor
                if len(parts) == self._model.num_experts:
                    yield stacked, torch.stack([parts[number] for number in sorted(parts)])
                    del experts[stacked]
                continue
            renamed = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
            if renamed is None:
                raise CheckpointError(f"{self._checkpoint.path}: tensor {name!r} has no name in gguf")
            yield renamed, self._in_order(renamed.split(".")[-2], tensor)
        table = self._checkpoint.model.rotary[0]
        rope, head_dim = table.rope, table.width
        if rope.kind == "llama3" or rope.divisors:  # divisors of frequencies: of Llama 3.1's scaling, or the source's
            scaled, _ = inverse_frequencies(rope, head_dim)
            plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
            yield "rope_freqs.weight", (plain / scaled).to(device)

    def _in_order(self, part: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as files of this kind have it: rows in their order, norms with the whole factor."""
        if part in self._heads:  # of each head, halves become interleaved pairs
            halves = tensor.reshape(self._heads[part], 2, -1, *tensor.shape[1:])
            return halves.transpose(1, 2).reshape(tensor.shape)
        offset = self._model.config.norm_offset if part.endswith("norm") else 0.0
        return tensor.float() + offset if offset else tensor
