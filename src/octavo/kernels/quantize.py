"""Low-bit weights in plain torch, on any device: how they are quantized, and the product. The specification of kernels.

The C++ kernels choose the same integers.

Legend: T = tokens, N = outputs, K = inputs, G = groups of inputs, E = inputs of a group.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.blocks import integer_groups
from octavo.kernels.quantization import TWO_LEVEL_GROUP_SIZE, Float8Format, IntegerFormat, PlainFormat, QuantizedWeight

_LARGEST_E4M3 = 448.0
_VANISHING = 1e-30  # smaller groups count as zeros: they are negligible next to any activation
# The largest value of a 4-bit group is scaled to the best of these; beyond 8 it is clipped.
_REACHES = (8.0, 6.5, 7.0, 7.5, 8.5, 9.0, 9.5, 10.0)
_MAX_AT_ONCE = 1 << 24  # weights: limits temporaries to a few hundred MB

_Parts = tuple[Tensor, Tensor, Tensor | None]  # values, scales, multipliers


def quantize(weight: Tensor, form: PlainFormat) -> QuantizedWeight:
    """Quantize weight [N, K] to a form."""
    if isinstance(form, Float8Format):
        parts_of = _to_floats
    else:
        parts_of = _to_two_level if form.is_two_level else partial(_to_groups, form=form)
    rows = torch.split(weight, max(1, _MAX_AT_ONCE // weight.shape[1]))
    values, scales, multipliers = zip(*(parts_of(form.rotated(part)) for part in rows), strict=True)
    joined = torch.cat(multipliers) if form.is_two_level else None
    return QuantizedWeight(format=form, values=torch.cat(values), scales=torch.cat(scales), multipliers=joined)


def _to_floats(weight: Tensor) -> _Parts:
    scales = _over(weight.abs().amax(-1, keepdim=True), _LARGEST_E4M3)  # [N, 1]
    scales = torch.where(scales < _VANISHING, 0.0, scales)
    scaled = torch.where(scales > 0.0, weight / scales, 0.0)
    return scaled.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn), scales, None


def _to_groups(weight: Tensor, form: IntegerFormat) -> _Parts:
    in_size = weight.shape[1]
    groups = _grouped(weight, form.group_size or in_size)  # [N, G, E]
    extremes = _farthest_from_zero(groups)  # [N, G, 1]
    most = 127 if form.bits == 8 else 7
    least = -127 if form.bits == 8 else -8

    def integers(scale: Tensor) -> Tensor:
        return (groups * (1.0 / scale)).round().clamp(least, most)

    def best_of_4_bits() -> Tensor:
        tried = [_over(extremes, -reach) for reach in _REACHES]
        errors = [(groups - integers(scale) * scale).square().sum(-1, keepdim=True) for scale in tried]
        return _first_least(errors, tried)

    scales = _over(extremes.abs(), 127.0) if form.bits == 8 else best_of_4_bits()
    vanishes = extremes.abs() < _VANISHING
    values = torch.where(vanishes, 0.0, integers(scales)).to(torch.int8)
    return values.flatten(1)[:, :in_size], torch.where(vanishes, 0.0, scales).squeeze(-1), None


def _to_two_level(weight: Tensor) -> _Parts:
    """Quantize to 8 bits with one scale for all inputs, then to 4 bits with a multiplier for each group."""
    in_size = weight.shape[1]
    largest = weight.abs().amax(-1, keepdim=True)  # [N, 1]
    vanishes = largest < _VANISHING
    in_steps = torch.where(vanishes, 0.0, weight * (torch.full_like(largest, 127.0) / largest))
    groups = _grouped(in_steps, TWO_LEVEL_GROUP_SIZE)  # [N, G, E]
    wanted = _farthest_from_zero(groups) * -8.0  # [N, G, 1]
    rough = [_over(wanted, reach) for reach in _REACHES]
    rough = [torch.trunc(m + torch.where(m < 0.0, -0.5, 0.5)).clamp(-127.0, 127.0) for m in rough]  # half away from 0
    multipliers, values = _best_multipliers(groups, rough)
    scales = torch.where(vanishes, 0.0, _over(largest, 127.0))
    return values.to(torch.int8).flatten(1)[:, :in_size], scales, multipliers.squeeze(-1).to(torch.int8)


def _best_multipliers(groups: Tensor, tried: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the best of some multipliers [N, G, 1] for groups [N, G, E], and the 4-bit integers that they multiply."""
    found, errors = [], []
    for multiplier in tried:
        values = (groups * (8.0 / multiplier)).round().clamp(-8.0, 7.0).nan_to_num(0.0)
        error = groups - torch.floor((values * multiplier + 4.0) / 8.0)
        # A multiplier of zero: the whole group is negligible next to the largest weight of the output.
        errors.append(error.square().sum(-1, keepdim=True).where(multiplier != 0.0, torch.inf))
        found.append(values)
    multipliers = _first_least(errors, tried)
    return multipliers, torch.where(multipliers == 0.0, 0.0, _first_least(errors, found))


def _grouped(weight: Tensor, group_size: int) -> Tensor:
    """Return weight [N, K] as [N, G, E], padded with zeros."""
    return F.pad(weight, (0, -weight.shape[1] % group_size)).view(len(weight), -1, group_size)


def _farthest_from_zero(groups: Tensor) -> Tensor:
    """Return the value of largest magnitude in each group [N, G, E]: [N, G, 1], signed; of ties, the positive one."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0.0), groups.amax(-1, keepdim=True).clamp(min=0.0)
    return torch.where(-low > high, low, high)


def _first_least(errors: list[Tensor], choices: list[Tensor]) -> Tensor:
    """Return the choice with the least error for each group; of ties, the first."""
    best, least = choices[0], errors[0]
    for error, choice in zip(errors[1:], choices[1:], strict=True):
        best, least = torch.where(error < least, choice, best), torch.minimum(error, least)
    return best


def _over(x: Tensor, divisor: float) -> Tensor:
    """Divide by a tensor: dividing by a number, torch multiplies by its reciprocal on a GPU, which rounds twice."""
    return x / torch.tensor(divisor, device=x.device)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Apply a weight and bias [N] to x [T, K]: [T, N] float32.

    With integer weights, each row is rotated if the weight is, and quantized with a scale of its own; products are
    summed exactly over the inputs of a group. With 8-bit floats, x is not quantized.
    """
    if isinstance(weight.format, Float8Format):
        return weight_only_linear(x, weight, bias)
    values, row_scales = integer_rows(weight.format.rotated(x))
    total = row_scales * _sum_of_groups(values, weight)
    return total if bias is None else total + bias.float()


def weight_only_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Do the same without quantizing x [T, K], whatever the weight's format."""
    total = _sum_of_groups(weight.format.rotated(x), weight)
    return total if bias is None else total + bias.float()


def integer_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] to int8, to nearest, ties to even; also return the scales [T, 1] float32: max|x| / 127.

    A row that is not finite gets a scale of NaN.
    """
    values, scales = integer_groups(x, x.shape[1])
    return values[:, 0], scales[:, 0]


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
