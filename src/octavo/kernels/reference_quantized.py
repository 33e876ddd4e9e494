"""Linear layers with low-bit weights in plain torch: the specification of all kernels that compute them.

Legend: T = tokens, N = outputs, K = inputs, G = groups of inputs, E = inputs of a group.
"""

import torch
from torch import Tensor

from octavo.kernels.quantization import Float8Format, IntegerFormat, QuantizedWeight

_MAX = 127.0
_VANISHING = 2.0**-120  # smaller rows count as zeros


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Apply a weight and bias [N] to x [T, K]: [T, N] float32.

    With integer weights, each row is rotated if the weight is, and quantized with a scale of its own; products are
    summed exactly over the inputs of a group. With 8-bit floats, x is not quantized.
    """
    if isinstance(weight.format, Float8Format):
        return weight_only_linear(x, weight, bias)
    values, row_scales = integer_rows(_rotated_like(x, weight))
    return _biased(row_scales * _sum_of_groups(values, weight), bias)


def weight_only_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Do the same without quantizing x [T, K], whatever the weight's format."""
    return _biased(_sum_of_groups(_rotated_like(x, weight), weight), bias)


def integer_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] to int8, to nearest, ties to even; also return the scales [T, 1] float32: max|x| / 127.

    A row that is not finite gets a scale of NaN.
    """
    largest = x.float().abs().amax(dim=-1, keepdim=True)  # NaN where there is one
    is_finite, most = largest.isfinite(), torch.full_like(largest, _MAX)
    is_computed = is_finite & (largest >= _VANISHING)
    inverse = torch.where(is_computed, most / largest, 0.0)
    values = torch.where(is_finite, x.float(), 0.0) * inverse
    scales = torch.where(is_computed, largest / most, torch.where(is_finite, 0.0, torch.nan))
    return values.round().to(torch.int8), scales


def _rotated_like(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return x [T, K], rotated if the weight is."""
    return weight.format.rotated(x) if isinstance(weight.format, IntegerFormat) else x


def _sum_of_groups(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return the sum over groups, in order, of scale * (exact sum) + offset * (sum of x): [T, N] float32."""
    in_size = x.shape[1]
    group_size = weight.format.group_size or in_size
    total = torch.zeros(len(x), len(weight.values), device=x.device)
    factors = weight.integers()
    for group, start in enumerate(range(0, in_size, group_size)):
        inputs = slice(start, start + group_size)
        part = x[:, inputs].double()  # [T, E]
        total += (part @ factors[:, inputs].double().T).float() * weight.scales[:, group]
        if weight.offsets is not None:
            total += part.sum(-1, keepdim=True).float() * weight.offsets[:, group]
    return total


def _biased(total: Tensor, bias: Tensor | None) -> Tensor:
    return total if bias is None else total + bias.float()
