"""Weights in 8-bit floats, e4m3: `quant_method` fp8 and fbgemm_fp8, and the float types of compressed-tensors.

w = scale * q, with one scale for the tensor, for each output, for groups of inputs, or for blocks of outputs and inputs
(DeepSeek-AI 2024, arXiv:2412.19437, section 3.3). Activations are not quantized, whatever the checkpoint asks for: that
is closer to what its weights stand for.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.config.json_fields import JsonFields
from octavo.distributed.groups import Share
from octavo.errors import CheckpointError
from octavo.kernels.quantization import Float8Format, QuantizedWeight, WeightFormat
from octavo.layers.quant.base import TensorSpec, WeightScheme
from octavo.layers.quant.names import LayerNames, UniformSchemes


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Scheme(WeightScheme):
    """A weight in e4m3."""

    method: str  # quant_method
    scale_names: tuple[str, ...] = ("weight_scale",)  # of which a file has one
    block: tuple[int | None, int | None] = (None, None)  # outputs and inputs that share a scale; None: all of them

    @property
    def form(self) -> Float8Format:  # type: ignore[override]  # kernels see a scale for each output
        return Float8Format(group_size=self.block[1])

    @property
    def name(self) -> str:
        return f"{self.method}, 8-bit floats"

    def tensors(self, num_outputs: int, in_size: int) -> dict[str, TensorSpec]:
        rows, _ = self.block
        shape = 1 if rows is None else -(-num_outputs // rows), self.form.num_groups(in_size)
        one = ((), (1,)) if shape == (1, 1) else ()
        of_outputs = ((num_outputs, 1), (num_outputs,)) if self.block == (None, None) else ()
        is_required = len(self.scale_names) == 1
        scales = TensorSpec(shape, is_required=is_required, other_shapes=(*one, *of_outputs))
        unused = TensorSpec((1,), is_required=False, other_shapes=((),))  # static ones of activations
        return {
            "weight": TensorSpec((num_outputs, in_size), is_float8=True),
            **dict.fromkeys(self.scale_names, scales),
            **dict.fromkeys(("input_scale", "activation_scale"), unused),
        }

    def weight(self, tensors: Mapping[str, torch.Tensor], outputs: Share, inputs: Share) -> QuantizedWeight:
        form, groups = self.form.of_share(inputs.start, inputs.stop, inputs.total)
        found = next((tensors[name] for name in self.scale_names if name in tensors), None)
        if found is None:
            raise CheckpointError(f"{self.name}: a weight has no {' or '.join(self.scale_names)}")
        scales = found.reshape(-1, self.form.num_groups(inputs.total)).float()  # [1 or blocks of outputs, G]
        if len(scales) == 1:
            rows = torch.zeros(outputs.size, dtype=torch.int64)
        else:
            rows = torch.arange(outputs.start, outputs.stop) // (self.block[0] or 1)
        device = scales.device
        return QuantizedWeight(
            format=form,
            values=tensors["weight"][outputs.start : outputs.stop, inputs.start : inputs.stop],
            scales=scales[rows.to(device)][:, groups.to(device)].contiguous(),
        )

    def form_of(self, inputs: Share) -> WeightFormat:
        return self.form.of_share(inputs.start, inputs.stop, inputs.total)[0]


def read_float8(fields: JsonFields) -> UniformSchemes:
    method = fields.text("quant_method")
    if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.unsupported("fmt", "; supported: 'e4m3'")
    if "weight_block_size" in fields:
        sizes = fields.integers("weight_block_size")
        if len(sizes) != 2 or not all(sizes):
            raise fields.fail("weight_block_size", "two numbers, of outputs and inputs, are expected")
        scheme = Float8Scheme(method=method, scale_names=("weight_scale_inv",), block=(sizes[0], sizes[1]))
    else:
        scheme = Float8Scheme(method=method, scale_names=("weight_scale", "weight_scale_inv"))
    return UniformSchemes(method, scheme, LayerNames.excluded(fields))
