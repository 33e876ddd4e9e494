"""What a weight becomes in few bits: what the C++ kernels choose, and for floats the nearest ones."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.conftest import InOneForm
from tests.kernels.levels import LEVELS

from octavo.kernels.quantization import Float8Format, IntegerFormat
from octavo.kernels.quantize import quantize

TWO_LEVEL = IntegerFormat(bits=4, group_size=None, is_two_level=True)
FORMS = [*(IntegerFormat(bits=bits, group_size=size) for bits in (8, 4) for size in (None, 32, 128)), TWO_LEVEL]
FORMS += [replace(FORMS[0], rotation="row"), replace(TWO_LEVEL, rotation="blocks")]


def make_weight(in_size: int = 300) -> torch.Tensor:
    weight = torch.randn(60, in_size, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight[3, 100:170] = 0.0
    weight[4] = 0.0
    weight[5] *= 1e-4
    return weight


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_integers_are_those_of_the_cpu(form: IntegerFormat) -> None:
    """But for near ties of two floating-point scales, where the order decides in which errors are added up."""
    kernels = InOneForm(LEVELS[0], form, 1)
    weight = make_weight(576 if form.rotation == "row" else 300)  # 9 blocks: mixed by threes
    found, expected = quantize(weight, form), kernels.quantize(weight, form)
    num_different = int((found.values != expected.values).sum())
    assert num_different <= (0 if form.bits == 8 or form.is_two_level else 40)
    if num_different == 0:
        assert torch.equal(found.dequantized(), expected.dequantized())


def test_slices_of_outputs_are_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(make_weight(), TWO_LEVEL)
    monkeypatch.setattr("octavo.kernels.quantize._MAX_AT_ONCE", 7 * 300)
    assert torch.equal(quantize(make_weight(), TWO_LEVEL).dequantized(), whole.dequantized())


@pytest.mark.parametrize("form", [FORMS[-1], TWO_LEVEL], ids=str)
def test_errors_of_two_levels_avoid_inputs_with_sparse_columns(form: IntegerFormat) -> None:
    """Such columns are those of large inputs. Without rotation, errors stay where they are."""
    random = torch.Generator().manual_seed(4)
    weight = torch.randn(512, 256, generator=random)
    plain = (quantize(weight, form).dequantized() - weight)[:, 17].square().mean()
    weight[:, 17] *= torch.randn(512, generator=random).pow(4)
    weight[:, 17] /= weight[:, 17].square().mean().sqrt()
    shaped = (quantize(weight, form).dequantized() - weight)[:, 17].square().mean()
    assert (shaped < plain / 4) == (form.rotation is not None)


def test_floats_are_the_nearest() -> None:
    weight = make_weight().float()
    found = quantize(weight, Float8Format())
    assert found.values.float().abs().amax(-1).tolist() == [448.0] * 4 + [0.0] + [448.0] * 55
    error = (found.dequantized() - weight).abs()
    # Half of a step of 3 bits of mantissa, or of the least numbers, 2^-9.
    assert (error <= torch.maximum(weight.abs() * 2.0**-4, found.scales * 2.0**-10) * 1.0001).all()
