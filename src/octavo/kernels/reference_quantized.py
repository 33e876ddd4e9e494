"""Linear maps with weights in few bits, in plain torch: the specification of all kernels that compute them.

Legend: T = tokens, N = outputs, K = inputs, G = groups of inputs, E = inputs of a group.
"""

import torch

from octavo.kernels.quantization import Float8Format, IntegerFormat, QuantizedWeight

_MAX = 127.0
_VANISHING = 2.0**-120  # a row of less counts as zeros


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Map x [T, K] by a weight and bias [N] to [T, N] float32.

    Integers meet integers: each row, rotated if the weight is, by a scale of its own, products summed exactly over the
    inputs of a group. Floats of 8 bits meet x as it is.
    """
    if isinstance(weight.format, Float8Format):
        return weight_only_linear(x, weight, bias)
    values, row_scales = integer_rows(_meeting(x, weight))
    return _biased(row_scales * _sum_of_groups(values, weight), bias)


def weight_only_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same with x [T, K] as it is, in floats, whatever the weight is."""
    return _biased(_sum_of_groups(_meeting(x, weight), weight), bias)


def integer_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [T, K] as integers, int8, to the nearest, ties to even, and their scales [T, 1] float32: max|x| / 127.

    A row that is not finite has a scale of NaN.
    """
    largest = x.float().abs().amax(dim=-1, keepdim=True)  # NaN where there is one
    is_finite, most = largest.isfinite(), torch.full_like(largest, _MAX)
    is_computed = is_finite & (largest >= _VANISHING)
    inverse = torch.where(is_computed, most / largest, 0.0)
    values = torch.where(is_finite, x.float(), 0.0) * inverse
    scales = torch.where(is_computed, largest / most, torch.where(is_finite, 0.0, torch.nan))
    return values.round().to(torch.int8), scales


def _meeting(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return x [T, K] as the weight is: rotated or not."""
    return weight.format.rotated(x) if isinstance(weight.format, IntegerFormat) else x


def _sum_of_groups(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
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


def _biased(total: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return total if bias is None else total + bias.float()
