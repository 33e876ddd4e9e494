"""Quantized tensors of GGUF files, computed in their blocks: `kernels/blocks.py`.

Layers that are computed as one may have parts of several types. With floats among them, all of them are dequantized.

Legend: N = outputs, K = inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.config.json_fields import JsonFields
from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.gguf.types import GGML_NUMBERS, GGML_TYPES, GgmlType
from octavo.kernels.blocks import GROUP_SIZE, BlockFormat, BlockWeight
from octavo.kernels.quantization import WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, TensorSpec, WeightScheme


@dataclass(frozen=True, slots=True)
class BlockScheme(WeightScheme):
    """A weight in the blocks of its file; `kinds` are the types of the parts of a merged layer, in order."""

    kinds: tuple[GgmlType, ...]
    form: None = None  # it depends on the sizes of the parts: `packed_form`

    @property
    def name(self) -> str:
        return "gguf " + "+".join(dict.fromkeys(kind.name for kind in self.kinds))

    @property
    def family(self) -> str:
        return "gguf"

    def merged(self, parts: Sequence[WeightScheme]) -> WeightScheme | None:
        kinds = [part.kinds for part in parts if isinstance(part, BlockScheme)]
        if len(kinds) == len(parts):
            return BlockScheme(sum(kinds, ()))
        return DENSE if all(part == DENSE or isinstance(part, BlockScheme) for part in parts) else None

    def part(self, index: int) -> "BlockScheme":
        return BlockScheme((self.kinds[index],))

    def spread(self, places: Sequence[int]) -> "BlockScheme":
        """Return the scheme of a layer whose parts are rows of the parts at these places."""
        return BlockScheme(tuple(self.kinds[place] for place in places))

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        [kind] = self.kinds
        return {"weight": TensorSpec((num_outputs, kind.row_bytes(in_size)), is_integer=True)}

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> BlockWeight:
        """See `WeightScheme.weight`. Rows stay whole: a rank's inputs may begin inside a block."""
        if inputs.start % GROUP_SIZE or inputs.size % GROUP_SIZE:
            found = f"{self.name}: inputs {inputs.start} to {inputs.stop} of {inputs.total}"
            limit = f"whole groups of {GROUP_SIZE}; set another tensor_parallel_size, or quantization='dequantize'"
            raise UnsupportedModelError(f"{found} are not {limit}")
        rows = tensors["weight"][outputs.start : outputs.stop]
        return BlockWeight(format=self.packed_form([outputs.size], inputs), parts=(rows,), in_size=inputs.size)

    def packed_form(self, outputs: Sequence[int], inputs: Share) -> BlockFormat:
        names = tuple(kind.name for kind in self.kinds)
        return BlockFormat(types=names, sizes=tuple(outputs), first_input=inputs.start, row_inputs=inputs.total)

    def merged_bytes(self, outputs: Sequence[int], in_size: int, dtype: torch.dtype) -> int:
        return sum(self.part(index).num_bytes(size, in_size, dtype) for index, size in enumerate(outputs))

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        [kind] = self.kinds
        return num_outputs * in_size * kind.block_bytes // kind.block_size


class GgufSchemes:
    """See `Schemes`. What the file has in floats is dense."""

    name = "gguf"

    def __init__(self, fields: JsonFields) -> None:
        types = fields.values
        self._schemes = {layer: BlockScheme((GGML_TYPES[GGML_NUMBERS[name]],)) for layer, name in types.items()}
        forms = (BlockFormat(types=(name,), sizes=(1,), row_inputs=1) for name in set(types.values()))
        self.forms: frozenset[WeightFormat | None] = frozenset({None, *forms})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        return DENSE if role == "router" else self._schemes.get(layer, DENSE)
