"""Integers with a scale and a zero per output and group of inputs: GPTQ and AWQ checkpoints, and what their kin share.

w = scale * (n - zero), n of 4 or 8 bits. Several n, and several zeros, are packed in a word of 32 bits:

- GPTQ (Frantar et al. 2023, arXiv:2210.17323), as AutoGPTQ and GPTQModel write it: n along the inputs, zeros along the
  outputs. With act-order ("desc_act") a group's inputs are not contiguous, and g_idx has the group of each input;
  columns are sorted by group here, and a rank's shard of the inputs has some of each group, padded.
- AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ and LLM Compressor's AWQ exporters write it: n and zeros along the
  outputs, in an order of their own: "gemm". The salient inputs' scales are in the weights already.

Legend: N = outputs, K = inputs, G = groups of inputs, W = words.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from octavo.config.json_fields import JsonFields
from octavo.distributed.groups import Share
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.kernels.quantization import IntegerFormat, QuantizedWeight, WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.quant.base import DENSE, TensorSpec, WeightScheme
from octavo.layers.quant.names import LayerNames, UniformSchemes
from octavo.layers.quant.packing import unpaired

# Zero point conventions: AutoGPTQ's own format stores them minus one.
_ADDED_TO_ZEROS = {"gptq": 1, "gptq_v2": 0}
_PADDED_TO = 32  # inputs that share a scale where groups are padded: as few as kernels take
_SKIPPED = "-:"
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's outputs, by output; counted from the lowest bits


def unpack(words: torch.Tensor, bits: int, start: int, stop: int) -> torch.Tensor:
    """Return integers `start` to `stop` of rows of words [R, W] int32, minus half their range: [R, stop - start] int8.

    The first of a word's integers is in its lowest bits.
    """
    in_word = 32 // bits
    octets = words[:, start // in_word : -(-stop // in_word)].contiguous().view(torch.uint8)  # little-endian
    unpacked = unpaired(octets, octets.shape[1] * 2) if bits == 4 else (octets ^ 128).view(torch.int8)
    return unpacked[:, start % in_word : start % in_word + stop - start]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedScheme(WeightScheme):
    """The arithmetic of groups and zeros; subclasses say in which tensors the parts are, and how."""

    method: ClassVar[str]  # quant_method
    form: IntegerFormat
    is_symmetric: bool  # zeros are at the midpoint of the range
    has_order: bool = False  # the groups of inputs are in a tensor of their own

    @property
    def name(self) -> str:
        groups = f"in groups of {self.form.group_size}" if self.form.group_size else "with a scale for each output"
        return f"{self.method}, {self.form.bits} bits {groups}{', with act-order' * self.has_order}"

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> QuantizedWeight:
        form, groups, order = self.columns(tensors, inputs)
        values = self.integers(tensors, outputs, inputs)
        if order is not None:
            values = values[:, order.clamp(min=0).long()]
        scales, zeros = self.scales(tensors, outputs, groups), self.zeros(tensors, outputs, groups)
        offsets = None if zeros is None else -scales * zeros
        has_offsets = offsets is not None and (not self.is_symmetric or bool(offsets.any()))
        return QuantizedWeight(
            format=form,
            values=values.contiguous(),
            scales=scales,
            offsets=offsets if has_offsets else None,
            order=order,
        )

    def columns(
        self, tensors: Mapping[str, torch.Tensor], inputs: Share
    ) -> tuple[IntegerFormat, torch.Tensor, torch.Tensor | None]:
        """Return the format of these inputs, the group [G] of each of its groups, and their columns' order."""
        form, groups = self.form.of_share(inputs.start, inputs.stop, inputs.total)
        return form, groups.to(next(iter(tensors.values())).device), None

    @abstractmethod
    def integers(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        """Return n [N, K] int8, less half its range if that is unsigned."""

    def scales(self, tensors: Mapping[str, torch.Tensor], outputs: Share, groups: torch.Tensor) -> torch.Tensor:
        return tensors["scales"][groups, outputs.start : outputs.stop].T.float().contiguous()

    @abstractmethod
    def zeros(self, tensors: Mapping[str, torch.Tensor], outputs: Share, groups: torch.Tensor) -> torch.Tensor | None:
        """Return the zeros [N, G] float32 of some groups, shifted as n is; None: they are all zero."""

    def form_of(self, inputs: Share) -> WeightFormat:
        return self.form.of_share(inputs.start, inputs.stop, inputs.total)[0]

    def num_bytes(self, num_outputs: int, in_size: int, dtype: torch.dtype) -> int:
        offsets = 0 if self.is_symmetric else 4 * num_outputs * self.form.num_groups(in_size)
        return self.form.num_bytes(num_outputs, in_size) + offsets + 4 * in_size * self.has_order

    def check_words(self, num_outputs: int, in_size: int, *sizes: int) -> int:
        """Return the number of integers in a word, of which each of `sizes` is a multiple."""
        in_word = 32 // self.form.bits
        if any(size % in_word for size in sizes):
            shape = f"[{num_outputs}, {in_size}]"
            raise UnsupportedModelError(f"{self.name}: a weight {shape} does not fill words of {in_word} integers")
        return in_word


@dataclass(frozen=True, kw_only=True, slots=True)
class AWQScheme(GroupedScheme):
    """AWQ's words."""

    method = "awq"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        num_words = num_outputs // self.check_words(num_outputs, in_size, num_outputs)
        zeros = (self.form.num_groups(in_size), num_words)
        return {
            "qweight": TensorSpec((in_size, num_words), is_integer=True),
            "qzeros": TensorSpec(zeros, is_integer=True, is_required=not self.is_symmetric),
            "scales": TensorSpec((zeros[0], num_outputs)),
        }

    def integers(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        return self._unpacked(tensors["qweight"][inputs.start : inputs.stop], outputs)

    def zeros(self, tensors: Mapping[str, torch.Tensor], outputs: Share, groups: torch.Tensor) -> torch.Tensor | None:
        return self._unpacked(tensors["qzeros"][groups], outputs).float() if "qzeros" in tensors else None

    def _unpacked(self, words: torch.Tensor, outputs: Share) -> torch.Tensor:
        """Return the integers of some outputs from words [R, all outputs / 8]: [N, R] int8."""
        in_word = len(_AWQ_PLACES)
        start, stop = outputs.start // in_word * in_word, -(-outputs.stop // in_word) * in_word
        by_place = unpack(words, self.form.bits, start, stop).view(len(words), -1, in_word)
        return by_place[..., list(_AWQ_PLACES)].flatten(1)[:, outputs.start - start : outputs.stop - start].T


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQScheme(GroupedScheme):
    """GPTQ's words, and its order of columns."""

    method = "gptq"
    added_to_zeros: int
    is_of_expert: bool = False  # whose linears keep their order, although it may not matter

    @property
    def selects_columns(self) -> bool:
        return not self.is_of_expert  # one call computes all experts of a token, each with columns of its own

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        in_word, num_groups = (
            self.check_words(num_outputs, in_size, num_outputs, in_size),
            self.form.num_groups(in_size),
        )
        return {
            "qweight": TensorSpec((in_size // in_word, num_outputs), is_integer=True),
            "qzeros": TensorSpec((num_groups, num_outputs // in_word), is_integer=True),
            "scales": TensorSpec((num_groups, num_outputs)),
            "g_idx": TensorSpec((in_size,), is_integer=True, is_required=self.has_order),
        }

    def integers(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> torch.Tensor:
        in_word, words = 32 // self.form.bits, tensors["qweight"]
        first = inputs.start // in_word
        words = words[first : -(-inputs.stop // in_word), outputs.start : outputs.stop].T.contiguous()
        return unpack(words, self.form.bits, inputs.start - first * in_word, inputs.stop - first * in_word)

    def zeros(self, tensors: Mapping[str, torch.Tensor], outputs: Share, groups: torch.Tensor) -> torch.Tensor:
        zeros = unpack(tensors["qzeros"][groups], self.form.bits, outputs.start, outputs.stop)
        return zeros.T.float() + self.added_to_zeros

    def form_of(self, inputs: Share) -> WeightFormat:
        return self._padded_form if self._pads_groups(inputs) else GroupedScheme.form_of(self, inputs)

    @property
    def _padded_form(self) -> IntegerFormat:
        return replace(self.form, group_size=_PADDED_TO)

    def _pads_groups(self, inputs: Share) -> bool:
        return self.has_order and self.form.group_size is not None and not inputs.is_whole

    def columns(
        self, tensors: Mapping[str, torch.Tensor], inputs: Share
    ) -> tuple[IntegerFormat, torch.Tensor, torch.Tensor | None]:
        of_inputs = tensors.get("g_idx")  # [K]
        if of_inputs is not None:
            self._check_groups(of_inputs, inputs)
            if self._pads_groups(inputs):
                return self._padded_form, *_padded_groups(of_inputs[inputs.start : inputs.stop])
        form, groups, _ = GroupedScheme.columns(self, tensors, inputs)
        if of_inputs is None or self.form.group_size is None:
            return form, groups, None
        ordered, order = of_inputs.sort(stable=True)
        is_in_order = torch.equal(ordered, of_inputs) and not (self.is_of_expert and self.has_order)
        return form, groups, None if is_in_order else order.to(torch.int32)

    def _check_groups(self, of_inputs: torch.Tensor, inputs: Share) -> None:
        expected = torch.arange(inputs.total, device=of_inputs.device) // (self.form.group_size or inputs.total)
        if not torch.equal(of_inputs.long().sort().values, expected):
            raise CheckpointError(f"{self.name}: g_idx does not put {self.form.group_size} inputs into each group")
        if not (self.has_order or torch.equal(of_inputs.long(), expected)) and not inputs.is_whole:
            why = "g_idx is not in order although desc_act is false; set tensor_parallel_size=1"
            raise UnsupportedModelError(f"{self.name}: {why}")


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


def read_awq(fields: JsonFields) -> UniformSchemes:
    bits = fields.integer("bits", fields.integer("w_bit", 4))
    group_size = fields.values.get("group_size", fields.values.get("q_group_size", 128))
    version = fields.text("version", "gemm").lower()
    if bits != 4:
        raise UnsupportedModelError(f"{fields.origin}: bits={bits} is not supported; supported: 4")
    if version != "gemm":
        raise fields.unsupported("version", "; supported: 'gemm'")
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        raise fields.fail("group_size", "a number of inputs, or -1 for all of them, is expected")
    form = IntegerFormat(bits=bits, group_size=None if group_size == -1 else group_size)
    scheme = AWQScheme(form=form, is_symmetric=not fields.flag("zero_point", True))
    return UniformSchemes("awq", scheme, LayerNames.excluded(fields))


class GPTQSchemes(UniformSchemes):
    """The logits head may be quantized, too, and GPTQModel can leave layers out in two more ways."""

    def __init__(self, fields: JsonFields) -> None:
        bits, group_size = fields.integer("bits"), fields.values.get("group_size", -1)
        convention = fields.text("checkpoint_format", "gptq")
        if bits not in (4, 8):
            raise fields.unsupported("bits", "; supported: 4, 8")
        if convention not in _ADDED_TO_ZEROS:
            raise fields.unsupported("checkpoint_format", f"; supported: {', '.join(_ADDED_TO_ZEROS)}")
        scheme = GPTQScheme(
            form=IntegerFormat(bits=bits, group_size=None if group_size == -1 else fields.integer("group_size")),
            is_symmetric=fields.flag("sym", True),
            has_order=fields.flag("desc_act", False),
            added_to_zeros=_ADDED_TO_ZEROS[convention],
        )
        super().__init__("gptq", scheme, LayerNames.excluded(fields), has_head=fields.flag("lm_head", False))
        # Kernels compute all experts as one, so all have an order or none has.
        self._of_experts = replace(scheme, is_of_expert=True)
        blocks = fields.values.get("modules_in_block_to_quantize")  # names, or lists of names
        names = [name for entry in blocks or [] for name in ([entry] if isinstance(entry, str) else entry)]
        self._included = LayerNames(names) if names else None
        self._skipped = _skipped_layers(fields)

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        is_left_out = role != "logits" and self._included is not None and layer not in self._included
        scheme = super().scheme_of(layer, role)
        if scheme is DENSE or is_left_out or layer in self._skipped:
            return DENSE
        return self._of_experts if "expert" in layer else scheme


def _skipped_layers(fields: JsonFields) -> LayerNames:
    """Return the layers that GPTQModel's `dynamic` leaves dense: regular expressions after "-:"."""
    dynamic = fields.nested("dynamic")
    for pattern in dynamic.values:
        settings = dynamic.nested(pattern).values
        own = {key: value for key, value in settings.items() if value != fields.values.get(key)}
        if own and not pattern.startswith(_SKIPPED):
            why = f"is not supported; only layers that are skipped ({_SKIPPED}...) are"
            raise UnsupportedModelError(f"{dynamic.origin}: {pattern!r}: {own!r} {why}")
    skipped = [pattern.removeprefix(_SKIPPED) for pattern in dynamic.values if pattern.startswith(_SKIPPED)]
    return LayerNames(f"re:{pattern}" for pattern in skipped)
