"""compressed-tensors checkpoints, as LLM Compressor writes them: integers of 8 or 4 bits, and 8-bit floats.

w = scale * (q - zero), with scale and zero per output, or per output and group of inputs. "int-quantized" files store q
directly, "pack-quantized" ones packed in words along the inputs, and zeros along the outputs. Dynamic 8-bit per-token
activations are what Octavo's integer kernels compute with in any case.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.config.json_fields import JsonFields
from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.quantization import IntegerFormat, WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, TensorSpec, WeightScheme
from octavo.layers.quant.float8 import Float8Scheme
from octavo.layers.quant.grouped import GroupedScheme, unpack
from octavo.layers.quant.names import LayerNames

_PACKED, _PLAIN, _FLOAT = "pack-quantized", ("int-quantized", "naive-quantized"), ("float-quantized", "naive-quantized")
_IN_WEIGHTS = ("weight_input", "weight_output")  # where transforms are multiplied into weights when they are saved
_CONTIGUOUS = (None, False, "weight", "static")  # values of actorder that keep a group's inputs contiguous


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedTensorsScheme(GroupedScheme):
    """Integers."""

    method = "compressed-tensors"
    is_packed: bool

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        in_word, num_groups = 32 // self.form.bits, self.form.num_groups(in_size)
        found = {"weight_scale": TensorSpec((num_outputs, num_groups))}
        if self.is_packed:
            found["weight_packed"] = TensorSpec((num_outputs, -(-in_size // in_word)), is_integer=True)
            found["weight_shape"] = TensorSpec((2,), is_integer=True)
        else:
            found["weight"] = TensorSpec((num_outputs, in_size), is_integer=True)
        if not self.is_symmetric:
            num_rows = -(-num_outputs // in_word) if self.is_packed else num_outputs
            found["weight_zero_point"] = TensorSpec((num_rows, num_groups), is_integer=True)
        return found

    def integers(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        if not self.is_packed:
            return tensors["weight"][outputs.start : outputs.stop, inputs.start : inputs.stop].to(torch.int8)
        words = tensors["weight_packed"][outputs.start : outputs.stop]
        return unpack(words, self.form.bits, inputs.start, inputs.stop)

    def scales(self, tensors: Mapping[str, torch.Tensor], outputs: Share, groups: torch.Tensor) -> torch.Tensor:
        return tensors["weight_scale"][outputs.start : outputs.stop][:, groups].float()

    def zeros(self, tensors: Mapping[str, torch.Tensor], outputs: Share, groups: torch.Tensor) -> torch.Tensor | None:
        if self.is_symmetric:
            return None
        zeros = tensors["weight_zero_point"]
        if self.is_packed:
            zeros = unpack(zeros.T.contiguous(), self.form.bits, outputs.start, outputs.stop).T
        else:
            zeros = zeros[outputs.start : outputs.stop]
        return zeros[:, groups].float()


class CompressedTensorsSchemes:
    """See `Schemes`. Groups of layers, each with its own scheme, matched by name."""

    name = "compressed-tensors"

    def __init__(self, fields: JsonFields) -> None:
        if fields.nested("sparsity_config").values.get("format", "dense") != "dense":
            raise UnsupportedModelError(f"{fields.origin}: sparsity_config: sparse weights are not supported")
        _refuse_online_transforms(fields.nested("transform_config").nested("config_groups"))
        self._ignored = LayerNames.excluded(fields)
        self._groups: list[tuple[list[str], LayerNames, CompressedTensorsScheme | Float8Scheme]] = []
        groups = fields.nested("config_groups")
        for key in groups.values:
            group = groups.nested(key)
            targets = group.texts("targets")
            self._groups.append((targets, LayerNames(targets), _read_group(group, fields.text("format", _PACKED))))
        self.forms: frozenset[WeightFormat | None] = frozenset({None, *(scheme.form for _, _, scheme in self._groups)})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        if role == "router" or layer in self._ignored:
            return DENSE
        named = (scheme for _, names, scheme in self._groups if layer in names)
        other = (scheme for targets, _, scheme in self._groups if "Linear" in targets)
        return next(named, next(other, DENSE))


def _refuse_online_transforms(groups: JsonFields) -> None:
    """Refuse transforms of activations, which must be computed in every step; those of weights are in the weights."""
    for key in groups.values:
        group = groups.nested(key)
        for place in group.objects("apply"):
            if (location := place.text("location")) not in _IN_WEIGHTS:
                why = f"location={location!r} is not supported; supported, as it is in the weights: "
                raise UnsupportedModelError(f"{place.origin}: {why}{', '.join(_IN_WEIGHTS)}")


def _read_group(group: JsonFields, file_format: str) -> CompressedTensorsScheme | Float8Scheme:
    weights, file_format = group.nested("weights"), group.text("format", file_format)
    _expect(weights, "type", "int", "float")
    _expect(group, "output_activations", None)
    if weights.text("type") == "float":
        return _read_floats(weights, file_format)
    _expect(weights, "num_bits", 8, 4)
    _expect(weights, "strategy", "channel", "group")
    _expect(weights, "actorder", *_CONTIGUOUS)
    _expect_format(weights, file_format, _PACKED, *_PLAIN)
    if (activations := group.nested("input_activations")).values:
        for key, expected in (("type", "int"), ("num_bits", 8), ("strategy", "token"), ("symmetric", True)):
            _expect(activations, key, expected)
    group_size = weights.integer("group_size") if weights.text("strategy") == "group" else None
    return CompressedTensorsScheme(
        form=IntegerFormat(bits=weights.integer("num_bits"), group_size=group_size),
        is_packed=file_format == _PACKED,
        is_symmetric=weights.flag("symmetric", True),
    )


def _read_floats(weights: JsonFields, file_format: str) -> Float8Scheme:
    """Read a group of 8-bit floats. Their activations stay as they are, so what is said about those does not matter."""
    _expect(weights, "num_bits", 8)
    _expect(weights, "symmetric", None, True)
    _expect(weights, "strategy", "tensor", "channel", "group", "block")
    _expect_format(weights, file_format, *_FLOAT)
    strategy, block = weights.text("strategy"), weights.integers("block_structure")
    if strategy == "block" and (len(block) != 2 or not all(block)):
        raise weights.fail("block_structure", "two numbers, of outputs and inputs, are expected")
    blocks: dict[str, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "block":
        blocks["block"] = block[0], block[1]
    if strategy == "group":
        blocks["group"] = 1, weights.integer("group_size")
    return Float8Scheme(method="compressed-tensors", block=blocks[strategy])


def _expect_format(weights: JsonFields, file_format: str, *supported: str) -> None:
    if file_format not in supported:
        limit = f"is not supported; supported: {', '.join(supported)}"
        raise UnsupportedModelError(f"{weights.origin}: format={file_format!r} {limit}")


def _expect(fields: JsonFields, key: str, *supported: object) -> None:
    if fields.values.get(key) not in supported:
        raise fields.unsupported(key, f"; supported: {', '.join(map(repr, supported))}")
