"""Weights in integers that ranks share: where a part, quantized alone, is the same part of the whole quantized.

Scales belong to an output and a group of inputs. Parts by outputs are the same, but with two-level 4 bits: which errors
cost most is read off the outputs that a rank has. Parts by inputs are the same where they begin and end with groups: of
128, say, the unit in which features are sharded. With 8 bits, or two-level 4, all inputs of an output share a scale, so
each rank has a scale of its own for its part: finer, and not the same.

Legend: N = outputs, K = inputs.
"""

import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.conftest import InOneForm
from tests.kernels.levels import LEVELS

from octavo.distributed.groups import Share
from octavo.kernels.quantization import (
    QUANTIZATIONS,
    Float8Format,
    IntegerFormat,
    Quantization,
    QuantizedWeight,
)

OUTPUTS, INPUTS = 1100, 2560

pytestmark = pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
IN_INTEGERS = [made for made in QUANTIZATIONS.values() if not isinstance(made.linear, Float8Format)]
every_quantization = pytest.mark.parametrize("quantization", IN_INTEGERS, ids=lambda quantization: quantization.name)


def quantize(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    form = quantization.linear
    assert isinstance(form, IntegerFormat)
    return InOneForm(LEVELS[0], form, 1).quantize(weight, form)


def random_weight() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@every_quantization
@each("size", pick([3], [2, 3, 4]))
def test_parts_by_outputs_are_the_same_integers(quantization: Quantization, size: int) -> None:
    """Of two-level ones, in scales and in what the rounding costs."""
    weight = random_weight()
    whole = quantize(weight, quantization)
    for rank in range(size):
        share = Share.of_features(OUTPUTS, rank, size)
        rows = weight[share.start : share.stop]
        part = quantize(rows, quantization)
        assert torch.equal(part.scales, whole.scales[share.start : share.stop])
        if part.multipliers is None:
            assert torch.equal(part.values, whole.values[share.start : share.stop])
        error = (part.dequantized() - rows.float()).square().mean()
        assert error <= 1.05 * (whole.dequantized()[share.start : share.stop] - rows.float()).square().mean()


@each("size", [2, 4, 5])
def test_parts_by_inputs_are_the_same_integers_where_groups_stay_whole(size: int) -> None:
    form = IntegerFormat(bits=4, group_size=128)
    weight, quantization = random_weight(), Quantization(name="grouped", linear=form, logits=form)
    whole = quantize(weight, quantization)
    for rank in range(size):
        share = Share.of_features(INPUTS, rank, size)
        part = quantize(weight[:, share.start : share.stop], quantization)
        assert torch.equal(part.values, whole.values[:, share.start : share.stop])
        assert torch.equal(part.scales, whole.scales[:, share.start // 128 : share.stop // 128])


@every_quantization
@each("size", [2, 3])
def test_parts_by_inputs_are_never_coarser_than_the_whole(quantization: Quantization, size: int) -> None:
    weight = random_weight()
    shares = [Share.of(INPUTS, rank, size) for rank in range(size)]  # across groups, too
    parts = [quantize(weight[:, share.start : share.stop], quantization).dequantized() for share in shares]
    error = (torch.cat(parts, dim=1) - weight.float()).square().mean()
    whole_error = (quantize(weight, quantization).dequantized() - weight.float()).square().mean()
    assert error <= 1.02 * whole_error
