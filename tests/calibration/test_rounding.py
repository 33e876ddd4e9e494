"""Rounding for the inputs that a weight meets: less error in the outputs, in the integers that kernels compute with."""

import torch

from octavo.calibration.rounding import round_to_two_level
from octavo.kernels.quantization import IntegerFormat, QuantizedWeight
from octavo.kernels.quantize import quantize

FORM = IntegerFormat(bits=4, group_size=None, is_two_level=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def output_error(found: QuantizedWeight, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    return float((inputs @ (found.dequantized() - weight).T).square().mean())


def test_outputs_change_less_than_by_rounding_each_number() -> None:
    weight, inputs = random(40, 200), random(900, 200) @ random(200, 200)
    found = round_to_two_level(weight, inputs.T @ inputs, FORM)
    assert output_error(found, weight, inputs) < 0.6 * output_error(quantize(weight, FORM), weight, inputs)


def test_integers_are_those_of_the_form() -> None:
    weight = random(7, 90)  # the last group is not whole
    weight[2], weight[3, 32:64] = 0.0, 0.0
    found = round_to_two_level(weight, torch.eye(90), FORM)
    assert found.multipliers is not None
    assert found.values.shape == weight.shape
    assert found.values.amin() >= -8
    assert found.values.amax() <= 7
    assert found.multipliers.shape == (7, 3)
    assert not found.dequantized()[2].any()
    assert not found.dequantized()[3, 32:64].any()
    # Inputs that have nothing to do with one another: nothing to make up for.
    errors = [float((form.dequantized() - weight).square().mean()) for form in (found, quantize(weight, FORM))]
    assert errors[0] < 1.2 * errors[1]


def test_inputs_that_were_never_seen_are_rounded_as_well_as_the_others() -> None:
    weight, inputs = random(10, 64), random(5, 64)
    inputs[:, 40:] = 0.0
    found = round_to_two_level(weight, inputs.T @ inputs, FORM)
    assert float((found.dequantized() - weight).square().mean()) < 0.05
    assert torch.isfinite(round_to_two_level(weight, torch.zeros(64, 64), FORM).dequantized()).all()
