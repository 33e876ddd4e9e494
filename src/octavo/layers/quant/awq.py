"""AWQ checkpoints (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ and LLM Compressor's AWQ exporters write them.

w = scale * (n - zero), n of 4 bits, with scale and zero per output and group of inputs. Both n and zeros are packed in
words along the outputs, in an order of their own: "gemm". The salient inputs' scales are in the weights already.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.config.json_fields import JsonFields
from octavo.distributed.shares import Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.quantization import IntegerFormat, QuantizedWeight, WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, TensorSpec, WeightScheme
from octavo.layers.quant.names import LayerNames
from octavo.layers.quant.words import per_word, unpack

_BITS = 4
_IN_WORD = per_word(_BITS)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's outputs, by output; counted from the lowest bits


@dataclass(frozen=True, kw_only=True, slots=True)
class AWQScheme(WeightScheme):
    """See the module docstring."""

    form: IntegerFormat
    is_symmetric: bool  # zeros are at the midpoint of the range

    @property
    def name(self) -> str:
        groups = f"in groups of {self.form.group_size}" if self.form.group_size else "with a scale for each output"
        return f"awq, {_BITS} bits {groups}"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        num_groups = self.form.num_groups(in_size)
        if num_outputs % _IN_WORD:
            shape = f"[{num_outputs}, {in_size}]"
            raise UnsupportedModelError(f"{self.name}: a weight {shape} does not fill words of {_IN_WORD} integers")
        return {
            "qweight": TensorSpec((in_size, num_outputs // _IN_WORD), is_integer=True),
            "qzeros": TensorSpec(
                (num_groups, num_outputs // _IN_WORD), is_integer=True, is_required=not self.is_symmetric
            ),
            "scales": TensorSpec((num_groups, num_outputs)),
        }

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> QuantizedWeight:
        form, groups = self.form.of_share(inputs.start, inputs.stop, inputs.total)
        groups = groups.to(tensors["scales"].device)
        values = _outputs_of(tensors["qweight"][inputs.start : inputs.stop], outputs).T  # [N, K]
        scales = tensors["scales"][groups, outputs.start : outputs.stop].T.float().contiguous()  # [N, G]
        offsets = None
        if "qzeros" in tensors:  # they are shifted by half the range, as n is
            offsets = -scales * _outputs_of(tensors["qzeros"][groups], outputs).T.float()
        has_offsets = offsets is not None and (not self.is_symmetric or bool(offsets.any()))
        return QuantizedWeight(
            format=form, values=values.contiguous(), scales=scales, offsets=offsets if has_offsets else None
        )

    def form_of(self, inputs: Share) -> WeightFormat:
        return self.form.of_share(inputs.start, inputs.stop, inputs.total)[0]

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        offsets = 0 if self.is_symmetric else 4 * num_outputs * self.form.num_groups(in_size)
        return self.form.num_bytes(num_outputs, in_size) + offsets


def _outputs_of(words: torch.Tensor, outputs: Share) -> torch.Tensor:
    """Return the integers of some outputs from words [R, all outputs / 8]: [R, N] int8, less half their range."""
    first = outputs.start // _IN_WORD
    words = words[:, first : -(-outputs.stop // _IN_WORD)]
    by_place = unpack(words, _BITS, _IN_WORD * words.shape[1]).view(len(words), -1, _IN_WORD)
    start = outputs.start - first * _IN_WORD
    return by_place[..., list(_PLACES)].flatten(1)[:, start : start + outputs.size]


class AWQSchemes:
    """See `Schemes`. All linears of decoder blocks are quantized, except those that the configuration excludes."""

    name = "awq"

    def __init__(self, fields: JsonFields) -> None:
        """Read the checkpoint's configuration, in either of its spellings.

        Raises:
            UnsupportedModelError: a setting that Octavo does not support.
        """
        bits = fields.integer("bits", fields.integer("w_bit", _BITS))
        group_size = fields.values.get("group_size", fields.values.get("q_group_size", 128))
        version = fields.text("version", "gemm").lower()
        if bits != _BITS:
            raise UnsupportedModelError(f"{fields.origin}: bits={bits} is not supported; supported: {_BITS}")
        if version != "gemm":
            raise UnsupportedModelError(f"{fields.origin}: version={version!r} is not supported; supported: 'gemm'")
        if type(group_size) is not int or (group_size < 1 and group_size != -1):
            raise fields.fail("group_size", "a number of inputs, or -1 for all of them, is expected")
        self._scheme = AWQScheme(
            form=IntegerFormat(bits=_BITS, group_size=None if group_size == -1 else group_size),
            is_symmetric=not fields.flag("zero_point", True),
        )
        self._excluded = LayerNames.excluded(fields)
        self.forms: frozenset[WeightFormat | None] = frozenset({None, self._scheme.form})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        return DENSE if role in ("router", "logits") or layer in self._excluded else self._scheme
