"""Low-bit weights in plain torch, on any device: how they are quantized, and the product. The specification of kernels.

The C++ kernels choose the same integers.

Legend: T = tokens, N = outputs, K = inputs, G = groups of inputs, E = inputs of a group.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.blocks import integer_groups
from octavo.kernels.quantization import (
    ROTATION_BLOCK,
    TWO_LEVEL_GROUP_SIZE,
    Float8Format,
    IntegerFormat,
    PlainFormat,
    QuantizedWeight,
    sums_and_differences,
)

_LARGEST_E4M3 = 448.0
_VANISHING = 1e-30  # smaller groups count as zeros: they are negligible next to any activation
# The largest value of a 4-bit group is scaled to the best of these; beyond 8 it is clipped.
_REACHES = (8.0, 6.5, 7.0, 7.5, 8.5, 9.0, 9.5, 10.0)
_MOST_SPARSE = 8.0  # mean(w^2) / mean(|w|)^2 of a column
_MAX_AT_ONCE = 1 << 24  # weights: limits temporaries to a few hundred MB

_Parts = tuple[Tensor, Tensor, Tensor | None]  # values, scales, multipliers


def quantize(weight: Tensor, form: PlainFormat, *, is_logits_head: bool = False) -> QuantizedWeight:
    """Quantize weight [N, K] to a form."""
    rows = torch.split(weight, max(1, _MAX_AT_ONCE // weight.shape[1]))
    if isinstance(form, Float8Format):
        parts_of: Callable[[Tensor], _Parts] = _to_floats
    elif form.is_two_level:
        has_blocks = form.rotation is not None and weight.shape[1] >= ROTATION_BLOCK
        parts_of = partial(_to_two_level, feedback=_error_feedback(rows, is_logits_head) if has_blocks else None)
    else:
        parts_of = partial(_to_groups, form=form)
    values, scales, multipliers = zip(*(parts_of(form.rotated(part)) for part in rows), strict=True)
    joined = torch.cat(multipliers) if isinstance(form, IntegerFormat) and form.is_two_level else None
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


def _error_feedback(rows: Sequence[Tensor], is_logits_head: bool) -> Tensor:
    """Return what part of each input's error later inputs of its block take over: [K // 64, 64, 64] float32.

    `kernels/cpu/error_feedback.cpp` explains it, and does the same in the same order.
    """
    num_blocks = rows[0].shape[1] // ROTATION_BLOCK
    sums, squares = torch.zeros(2, num_blocks, ROTATION_BLOCK, dtype=torch.float64, device=rows[0].device)
    largest = torch.stack([part.abs().amax() for part in rows]).amax().float()
    steps = torch.where(largest < _VANISHING, 0.0, torch.full_like(largest, 2047.0) / largest)
    for part in rows:
        rounded = (part[:, : sums.numel()].float().abs() * steps).round().double()
        sums += rounded.sum(0).view_as(sums)
        squares += rounded.square().sum(0).view_as(sums)
    num_rows = sum(map(len, rows))
    sparsity = torch.where(sums > 0.0, num_rows * squares / (sums * sums), 1.0).clamp(max=_MOST_SPARSE)
    cube = sparsity * sparsity * sparsity
    importance, step = squares.clamp(min=num_rows) if is_logits_head else cube * cube, 1
    while step < ROTATION_BLOCK:
        importance, step = sums_and_differences(importance, step), step * 2
    numbers = torch.arange(ROTATION_BLOCK, device=sums.device)
    costs = importance[:, numbers[:, None] ^ numbers]  # [K // 64, 64, 64]
    feedback = torch.zeros_like(costs)
    for k in range(ROTATION_BLOCK - 1, 0, -1):
        before = costs[:, k, :k]
        feedback[:, k, :k] = share = before / costs[:, k, k, None]
        costs[:, :k, :k] -= share[:, :, None] * before[:, None, :]
    return ((feedback * 128.0).round().clamp(-256.0, 256.0) / 128.0).float()


def _to_two_level(weight: Tensor, feedback: Tensor | None) -> _Parts:
    """Quantize to 8 bits with one scale for all inputs, then to 4 bits with a multiplier for each group.

    Weights become multiples of 1/16 of an 8-bit step first, so that all sums are exact.
    """
    in_size = weight.shape[1]
    largest = weight.abs().amax(-1, keepdim=True)  # [N, 1]
    vanishes = largest < _VANISHING
    in_steps = torch.where(vanishes, 0.0, weight * (torch.full_like(largest, 127.0) / largest))
    blocks = _grouped((in_steps * 16.0).round() / 16.0, ROTATION_BLOCK)  # [N, B, 64]
    factors = torch.zeros(blocks.shape[1], ROTATION_BLOCK, ROTATION_BLOCK, device=weight.device)
    if feedback is not None:
        factors[: len(feedback)] = feedback
    values, errors = torch.zeros_like(blocks), torch.zeros_like(blocks)
    multipliers = []
    for first in range(0, ROTATION_BLOCK, TWO_LEVEL_GROUP_SIZE):
        group = slice(first, first + TWO_LEVEL_GROUP_SIZE)
        fed = torch.einsum("nbi,bki->nbk", errors[..., :first].double(), factors[:, group, :first].double())
        multiplier = _best_multipliers(blocks[..., group] + fed.float()).squeeze(-1)  # [N, B]
        multipliers.append(multiplier)
        for k in range(group.start, group.stop):
            wanted = blocks[..., k] + (errors[..., :k] * factors[:, k, :k]).sum(-1)
            values[..., k], meant = _nearest(wanted, multiplier)
            errors[..., k] = (blocks[..., k] - meant).clamp(-64.0, 64.0)
    scales = torch.where(vanishes, 0.0, _over(largest, 127.0))
    of_groups = torch.stack(multipliers, -1).flatten(1)[:, : -(-in_size // TWO_LEVEL_GROUP_SIZE)].to(torch.int8)
    return values.to(torch.int8).flatten(1)[:, :in_size], scales, of_groups


def _best_multipliers(groups: Tensor) -> Tensor:
    """Return the best of some multipliers, [..., 1], for groups [..., E] in 8-bit steps."""
    groups = (groups * 16.0).round() / 16.0  # squares of errors are added exactly, too
    wanted = _farthest_from_zero(groups) * -8.0
    rough = [_over(wanted, reach) for reach in _REACHES]
    tried = [torch.trunc(m + torch.where(m < 0.0, -0.5, 0.5)).clamp(-127.0, 127.0) for m in rough]  # half away from 0
    squares = [(groups - _nearest(groups, multiplier)[1]).square().clamp(max=1024.0) for multiplier in tried]
    # A multiplier of zero: the whole group is negligible next to the largest weight of the output.
    sums = zip(squares, tried, strict=True)
    errors = [square.sum(-1, keepdim=True).where(multiplier != 0.0, torch.inf) for square, multiplier in sums]
    return _first_least(errors, tried)


def _nearest(wanted: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest 4-bit integers to values in 8-bit steps, and what they mean."""
    inverse = torch.where(multipliers == 0.0, 0.0, 8.0 / multipliers)
    values = (wanted * inverse).round().clamp(-8.0, 7.0)
    return values, torch.floor((values * multipliers + 4.0) / 8.0)


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
