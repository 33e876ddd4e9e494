"""GPTQ checkpoints (Frantar et al. 2023, arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

w = scale * (n - zero), n of 4 or 8 bits, with scale and zero per output and group of inputs. n is packed in words along
the inputs, zeros along the outputs. With act-order ("desc_act") a group's inputs are not contiguous, and g_idx has the
group of each input.

Legend: N = outputs, K = inputs, G = groups of inputs, W = integers per word.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from octavo.config.json_fields import JsonFields
from octavo.distributed.shares import Share
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.kernels.quantization import IntegerFormat, QuantizedWeight, WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, TensorSpec, WeightScheme
from octavo.layers.quant.names import LayerNames
from octavo.layers.quant.words import per_word, unpack

# Zero point conventions: AutoGPTQ's own format stores them minus one.
_ADDED_TO_ZEROS = {"gptq": 1, "gptq_v2": 0}
_EXPERT = "expert"  # in the names of experts' layers, also of a shared one


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQScheme(WeightScheme):
    """See the module docstring."""

    form: IntegerFormat
    is_symmetric: bool  # zeros are at the midpoint of the range
    has_order: bool
    added_to_zeros: int
    keeps_order: bool = False  # although it may not matter

    @property
    def name(self) -> str:
        groups = f"in groups of {self.form.group_size}" if self.form.group_size else "with a scale for each output"
        return f"gptq, {self.form.bits} bits {groups}{', with act-order' * self.has_order}"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        in_word, num_groups = per_word(self.form.bits), self.form.num_groups(in_size)
        if in_size % in_word or num_outputs % in_word:
            shape = f"[{num_outputs}, {in_size}]"
            raise UnsupportedModelError(f"{self.name}: a weight {shape} does not fill words of {in_word} integers")
        return {
            "qweight": TensorSpec((in_size // in_word, num_outputs), is_integer=True),
            "qzeros": TensorSpec((num_groups, num_outputs // in_word), is_integer=True),
            "scales": TensorSpec((num_groups, num_outputs)),
            "g_idx": TensorSpec((in_size,), is_integer=True, is_required=self.has_order),
        }

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> QuantizedWeight:
        bits, in_word, order = self.form.bits, per_word(self.form.bits), self._order(tensors, inputs)
        first = inputs.start // in_word
        words = tensors["qweight"][first : -(-inputs.stop // in_word), outputs.start : outputs.stop]
        values = unpack(words.T.contiguous(), bits, in_word * len(words))  # [N, K plus the padding of the outer words]
        start = inputs.start - first * in_word
        values = values[:, start : start + inputs.size] if order is None else values[:, order.long()]
        form, groups = self.form.of_share(inputs.start, inputs.stop, inputs.total)
        groups = groups.to(words.device)
        scales = tensors["scales"][groups, outputs.start : outputs.stop].T.float().contiguous()  # [N, G]
        zeros = unpack(tensors["qzeros"][groups], bits, outputs.total)[:, outputs.start : outputs.stop].T
        offsets = -scales * (zeros.float() + self.added_to_zeros)  # [N, G]; n and zeros are shifted by half the range
        has_offsets = not self.is_symmetric or bool(offsets.any())
        return QuantizedWeight(
            format=form, values=values, scales=scales, offsets=offsets if has_offsets else None, order=order
        )

    def form_of(self, inputs: Share) -> WeightFormat:
        return self.form.of_share(inputs.start, inputs.stop, inputs.total)[0]

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        offsets = 0 if self.is_symmetric else 4 * num_outputs * self.form.num_groups(in_size)
        return self.form.num_bytes(num_outputs, in_size) + offsets + 4 * in_size * self.has_order

    def _order(self, tensors: Mapping[str, torch.Tensor], inputs: Share) -> torch.Tensor | None:
        """Return the inputs [K] int32 sorted by group; None if groups are contiguous."""
        of_inputs = tensors.get("g_idx")  # [K]
        if of_inputs is None:
            return None
        expected = torch.arange(inputs.total, device=of_inputs.device) // (self.form.group_size or inputs.total)
        if torch.equal(of_inputs.long(), expected):
            return torch.arange(inputs.size, dtype=torch.int32, device=of_inputs.device) if self.keeps_order else None
        ordered, order = of_inputs.long().sort(stable=True)
        if not torch.equal(ordered, expected):
            raise CheckpointError(f"{self.name}: g_idx does not put {self.form.group_size} inputs into each group")
        if not inputs.is_whole:
            why = "act-order groups cannot be sharded over ranks; set tensor_parallel_size=1"
            raise UnsupportedModelError(f"{self.name}: {why}")
        return order.to(torch.int32)

    @property
    def of_expert(self) -> "GPTQScheme":
        """The scheme of an expert's linears: kernels compute all experts as one, so all have an order or none has."""
        return replace(self, keeps_order=self.has_order and self.form.group_size is not None)


class GPTQSchemes:
    """See `Schemes`. All linears of decoder blocks are quantized, except those that the configuration excludes."""

    name = "gptq"

    def __init__(self, fields: JsonFields) -> None:
        """Read the checkpoint's configuration.

        Raises:
            UnsupportedModelError: a setting that Octavo does not support.
        """
        bits, group_size = fields.integer("bits"), fields.values.get("group_size", -1)
        convention = fields.text("checkpoint_format", "gptq")
        if bits not in (4, 8):
            raise UnsupportedModelError(f"{fields.origin}: bits={bits} is not supported; supported: 4, 8")
        if convention not in _ADDED_TO_ZEROS:
            known = ", ".join(_ADDED_TO_ZEROS)
            raise UnsupportedModelError(
                f"{fields.origin}: checkpoint_format={convention!r} is not supported; supported: {known}"
            )
        if fields.values.get("dynamic"):
            raise UnsupportedModelError(f"{fields.origin}: dynamic={fields.values['dynamic']!r} is not supported")
        self._scheme = GPTQScheme(
            form=IntegerFormat(bits=bits, group_size=None if group_size == -1 else fields.integer("group_size")),
            is_symmetric=fields.flag("sym", True),
            has_order=fields.flag("desc_act", False),
            added_to_zeros=_ADDED_TO_ZEROS[convention],
        )
        blocks = fields.values.get("modules_in_block_to_quantize")  # names, or lists of names
        names = [name for entry in blocks or [] for name in ([entry] if isinstance(entry, str) else entry)]
        self._included = LayerNames(names) if names else None
        self._excluded = LayerNames(
            fields.texts("modules_to_not_convert") if "modules_to_not_convert" in fields else ()
        )
        self._has_head = fields.flag("lm_head", False)
        self.forms: frozenset[WeightFormat | None] = frozenset({None, self._scheme.form})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        is_dense = role == "router" or (role == "logits" and not self._has_head) or layer in self._excluded
        if is_dense or (role != "logits" and self._included is not None and layer not in self._included):
            return DENSE
        return self._scheme.of_expert if _EXPERT in layer else self._scheme
