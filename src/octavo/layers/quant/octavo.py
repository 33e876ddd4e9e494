"""Checkpoints that `octavo convert --quantize` writes: the integer formats of `quantization=`, but calibrated.

No public format can express that inputs are rotated, so `quant_method` is "octavo". The settings:

    {"quant_method": "octavo", "version": 1, "bits": 4, "bits_for": {"model.layers.0.mlp.down_proj": 8}}

A weight [N, K], w = scale * q, rotated in blocks of 64, is stored as three tensors, or two if it has 8 bits:

- `qweight`, uint8 [N, ceil(K / 2)]: two q of -8 ... 7 in a byte, plus 8, the first in the low nibble; or int8 [N, K].
- `multipliers`, int8 [N, ceil(K / 32)], only with 4 bits: see `IntegerFormat` in `kernels/quantization.py`.
- `scales`, float32 [N].

The logits head has its own tensors, even where it was tied to the embedding.

Legend: N = outputs, K = inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from octavo.config.json_fields import JsonFields
from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.quantization import (
    ROTATION_BLOCK,
    TWO_LEVEL_GROUP_SIZE,
    IntegerFormat,
    QuantizedWeight,
    WeightFormat,
)
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, TensorSpec, WeightScheme
from octavo.layers.quant.packing import paired, unpaired

METHOD, VERSION = "octavo", 1
# "blocks" with 8 bits, too: a rank that holds a shard of a layer's inputs cannot rotate over all of them.
FORMS = MappingProxyType(
    {
        8: IntegerFormat(bits=8, group_size=None, rotation="blocks"),
        4: IntegerFormat(bits=4, group_size=None, is_two_level=True, rotation="blocks"),
    }
)


@dataclass(frozen=True, slots=True)
class OctavoScheme(WeightScheme):
    """Integers of one weight."""

    form: IntegerFormat

    @property
    def name(self) -> str:
        return f"octavo, {self.form.bits} bits"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        width = in_size if self.form.bits == 8 else -(-in_size // 2)
        specs = {"qweight": TensorSpec((num_outputs, width), is_integer=True), "scales": TensorSpec((num_outputs,))}
        if num_multipliers := self.form.num_multipliers(in_size):
            specs["multipliers"] = TensorSpec((num_outputs, num_multipliers), is_integer=True)
        return specs

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> QuantizedWeight:
        if inputs.start % ROTATION_BLOCK or (inputs.stop < inputs.total and inputs.stop % ROTATION_BLOCK):
            share = f"inputs {inputs.start} to {inputs.stop} of {inputs.total} on one rank"
            limit = f"inputs are rotated by {ROTATION_BLOCK}, which ranks cannot divide; lower tensor_parallel_size"
            raise UnsupportedModelError(f"{self.name}: {share}; {limit}")
        rows = slice(outputs.start, outputs.stop)
        groups = slice(inputs.start // TWO_LEVEL_GROUP_SIZE, -(-inputs.stop // TWO_LEVEL_GROUP_SIZE))
        multipliers = tensors["multipliers"][rows, groups].to(torch.int8) if "multipliers" in tensors else None
        if self.form.bits == 8:
            values = tensors["qweight"][rows, inputs.start : inputs.stop].to(torch.int8)
        else:
            pairs = tensors["qweight"][rows, inputs.start // 2 : -(-inputs.stop // 2)].to(torch.uint8)
            values = unpaired(pairs, inputs.size)
        return QuantizedWeight(
            format=self.form,
            values=values,
            scales=tensors["scales"][rows].float()[:, None],
            multipliers=multipliers,
        )


def stored_tensors(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight [N, K] for a file, by name suffix: what `OctavoScheme` reads."""
    tensors = {"qweight": weight.values, "scales": weight.scales.flatten()}
    if weight.format.bits == 4:
        tensors["qweight"] = paired(weight.values)
    if weight.multipliers is not None:
        tensors["multipliers"] = weight.multipliers
    return tensors


class OctavoSchemes:
    """See `Schemes`. All linears but routers are quantized."""

    name = METHOD

    def __init__(self, fields: JsonFields) -> None:
        if fields.integer("version") != VERSION:
            raise fields.unsupported("version", f"; supported: {VERSION}")
        self._scheme = OctavoScheme(_form(fields, "bits"))
        others = fields.nested("bits_for")
        self._others = {layer: OctavoScheme(_form(others, layer)) for layer in others.values}
        schemes = self._scheme, *self._others.values()
        self.forms: frozenset[WeightFormat | None] = frozenset({None, *(scheme.form for scheme in schemes)})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        return DENSE if role == "router" else self._others.get(layer, self._scheme)


def _form(fields: JsonFields, key: str) -> IntegerFormat:
    if (bits := fields.integer(key)) not in FORMS:
        raise fields.unsupported(key, f"; supported: {', '.join(map(str, sorted(FORMS)))}")
    return FORMS[bits]
