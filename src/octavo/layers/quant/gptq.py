"""GPTQ checkpoints (Frantar et al. 2023, arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

w = scale * (n - zero), n of 4 or 8 bits, with scale and zero per output and group of inputs. n is packed in words along
the inputs, zeros along the outputs. With act-order ("desc_act") a group's inputs are not contiguous, and g_idx has the
group of each input; columns are sorted by group here, and a rank's shard of the inputs has some of each group, padded.

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
_PADDED_TO = 32  # inputs that share a scale where groups are padded: as few as kernels take
_EXPERT = "expert"  # in the names of experts' layers, also of a shared one
_SKIPPED = "-:"


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQScheme(WeightScheme):
    """See the module docstring."""

    form: IntegerFormat
    is_symmetric: bool  # zeros are at the midpoint of the range
    has_order: bool
    added_to_zeros: int
    is_of_expert: bool = False  # whose linears keep their order, although it may not matter

    @property
    def selects_columns(self) -> bool:
        return not self.is_of_expert  # one call computes all experts of a token, each with columns of its own

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
        bits, in_word = self.form.bits, per_word(self.form.bits)
        first = inputs.start // in_word
        words = tensors["qweight"][first : -(-inputs.stop // in_word), outputs.start : outputs.stop]
        values = unpack(words.T.contiguous(), bits, in_word * len(words))  # [N, K plus the padding of the outer words]
        start = inputs.start - first * in_word
        values = values[:, start : start + inputs.size]
        form, groups, order = self._columns(tensors, inputs)
        if order is not None:
            values = values[:, order.clamp(min=0).long()]
        scales = tensors["scales"][groups, outputs.start : outputs.stop].T.float().contiguous()  # [N, G]
        zeros = unpack(tensors["qzeros"][groups], bits, outputs.total)[:, outputs.start : outputs.stop].T
        offsets = -scales * (zeros.float() + self.added_to_zeros)  # [N, G]; n and zeros are shifted by half the range
        has_offsets = not self.is_symmetric or bool(offsets.any())
        return QuantizedWeight(
            format=form, values=values, scales=scales, offsets=offsets if has_offsets else None, order=order
        )

    def form_of(self, inputs: Share) -> WeightFormat:
        if self._pads_groups(inputs):
            return replace(self.form, group_size=_PADDED_TO)
        return self.form.of_share(inputs.start, inputs.stop, inputs.total)[0]

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        offsets = 0 if self.is_symmetric else 4 * num_outputs * self.form.num_groups(in_size)
        return self.form.num_bytes(num_outputs, in_size) + offsets + 4 * in_size * self.has_order

    def _pads_groups(self, inputs: Share) -> bool:
        return self.has_order and self.form.group_size is not None and not inputs.is_whole

    def _columns(
        self, tensors: Mapping[str, torch.Tensor], inputs: Share
    ) -> tuple[IntegerFormat, torch.Tensor, torch.Tensor | None]:
        """Return the format of these inputs, the group of each of its groups, and their columns' order."""
        of_inputs, device = tensors.get("g_idx"), tensors["qweight"].device  # [K]
        if of_inputs is not None:
            self._check_groups(of_inputs, inputs)
            if self._pads_groups(inputs):
                groups, order = _padded_groups(of_inputs[inputs.start : inputs.stop])
                return replace(self.form, group_size=_PADDED_TO), groups, order
        form, groups = self.form.of_share(inputs.start, inputs.stop, inputs.total)
        if of_inputs is None or self.form.group_size is None:
            return form, groups.to(device), None
        ordered, order = of_inputs.sort(stable=True)
        if torch.equal(ordered, of_inputs) and not (self.is_of_expert and self.has_order):
            return form, groups.to(device), None
        return form, groups.to(device), order.to(torch.int32)

    def _check_groups(self, of_inputs: torch.Tensor, inputs: Share) -> None:
        expected = torch.arange(inputs.total, device=of_inputs.device) // (self.form.group_size or inputs.total)
        ordered = of_inputs.long().sort().values
        if not torch.equal(ordered, expected):
            raise CheckpointError(f"{self.name}: g_idx does not put {self.form.group_size} inputs into each group")
        if not (self.has_order or torch.equal(of_inputs.long(), expected)) and not inputs.is_whole:
            why = "g_idx is not in order although desc_act is false; set tensor_parallel_size=1"
            raise UnsupportedModelError(f"{self.name}: {why}")

    @property
    def of_expert(self) -> "GPTQScheme":
        """The scheme of an expert's linears: kernels compute all experts as one, so all have an order or none has."""
        return replace(self, is_of_expert=True)


def _padded_groups(of_inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort inputs by their groups [K], each padded to a multiple of 32; return (groups [J / 32], order [J] int32)."""
    ordered, order = of_inputs.long().sort(stable=True)
    found, counts = torch.unique(ordered, return_counts=True)
    num_padded = -(-counts // _PADDED_TO)  # times 32, of each
    starts = (num_padded.cumsum(0) - num_padded) * _PADDED_TO
    places = starts.repeat_interleave(counts) + torch.arange(len(ordered), device=order.device)
    places -= (counts.cumsum(0) - counts).repeat_interleave(counts)
    padded = torch.full((int(num_padded.sum()) * _PADDED_TO,), -1, dtype=torch.int32, device=order.device)
    padded[places] = order.to(torch.int32)
    return found.repeat_interleave(num_padded), padded


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
        self._scheme = GPTQScheme(
            form=IntegerFormat(bits=bits, group_size=None if group_size == -1 else fields.integer("group_size")),
            is_symmetric=fields.flag("sym", True),
            has_order=fields.flag("desc_act", False),
            added_to_zeros=_ADDED_TO_ZEROS[convention],
        )
        blocks = fields.values.get("modules_in_block_to_quantize")  # names, or lists of names
        names = [name for entry in blocks or [] for name in ([entry] if isinstance(entry, str) else entry)]
        self._included = LayerNames(names) if names else None
        self._excluded, self._skipped = LayerNames.excluded(fields), _skipped_layers(fields)
        self._has_head = fields.flag("lm_head", False)
        self.forms: frozenset[WeightFormat | None] = frozenset({None, self._scheme.form})

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        is_excluded = layer in self._excluded or layer in self._skipped
        is_dense = role == "router" or (role == "logits" and not self._has_head) or is_excluded
        if is_dense or (role != "logits" and self._included is not None and layer not in self._included):
            return DENSE
        return self._scheme.of_expert if _EXPERT in layer else self._scheme


def _skipped_layers(fields: JsonFields) -> LayerNames:
    """Return the layers that GPTQModel's `dynamic` leaves dense: regular expressions after "-:".

    Raises:
        UnsupportedModelError: it also gives some layers settings of their own.
    """
    dynamic = fields.nested("dynamic")
    for pattern in dynamic.values:
        settings = dynamic.nested(pattern).values
        own = {key: value for key, value in settings.items() if value != fields.values.get(key)}
        if own and not pattern.startswith(_SKIPPED):
            why = f"is not supported; only layers that are skipped ({_SKIPPED}...) are"
            raise UnsupportedModelError(f"{dynamic.origin}: {pattern!r}: {own!r} {why}")
    skipped = [pattern.removeprefix(_SKIPPED) for pattern in dynamic.values if pattern.startswith(_SKIPPED)]
    return LayerNames(f"re:{pattern}" for pattern in skipped)
