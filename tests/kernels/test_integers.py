"""Weights in integers: how they are chosen, that sums are exact, and that a row's bits depend on that row alone.

Legend: T = tokens (rows), K = input size, N = output size, G = groups of inputs, I = intermediate size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import InOneForm
from tests.kernels.levels import ALL_LEVELS, LEVELS

from octavo.errors import InvalidParameterError
from octavo.kernels.dispatch import select_kernels
from octavo.kernels.quantization import IntegerFormat, QuantizedWeight, get_quantization
from octavo.kernels.types import SILU, Activation, ActivationKind, Fused, PackedLinear
from octavo.layers.quant.registry import check_quantization_at_load, make_schemes

MAX_ROWS = 70
TWO_LEVEL = IntegerFormat(bits=4, group_size=None, is_two_level=True)
FORMS = [*(IntegerFormat(bits=bits, group_size=size) for bits in (8, 4) for size in (None, 32, 64, 128)), TWO_LEVEL]
FORMS += [
    replace(FORMS[0], rotation="blocks"),
    replace(FORMS[0], rotation="row"),
    replace(TWO_LEVEL, rotation="blocks"),
]
SHAPES = [(37, 84), (96, 1024), (64, 40), (33, 300), (40, 1100), (16, 576)]  # N, K
# Tiles, vectors, and both sides of each border between them.
SOME_ROWS = [(0, 1), (3, 2), (5, 4), (1, 5), (20, 9), (0, 16), (2, 17), (7, 33)]

pytestmark = pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
every_form = each("form", FORMS)
every_level = pytest.mark.parametrize("level", LEVELS)


def make_kernels(
    level: str, form: IntegerFormat, num_threads: int = 2, dtype: torch.dtype = torch.bfloat16
) -> InOneForm:
    return InOneForm(level, form, num_threads, dtype)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def integer_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [T, K] as integers and their scale [T, 1], as the kernels are to choose them."""
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    inverse = torch.tensor(127.0) / largest  # `127.0 / largest` would round twice
    return (x.float() * inverse).round().double(), (largest / 127.0).double()


def exact_product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return [T, N] float64: the product that is meant, with nothing rounded after x has become integers."""
    assert isinstance(weight.format, IntegerFormat)
    if weight.format.rotation:
        x, weight = weight.format.rotated(x), replace(weight, format=replace(weight.format, rotation=None))
    integers, scale = integer_rows(x)
    return scale * (integers @ weight.dequantized().double().T)


def random_integers(form: IntegerFormat, num_outputs: int, in_size: int, *, has_offsets: bool) -> QuantizedWeight:
    """Return integers of the whole range, as other programs' files may bring them."""
    generator = torch.Generator().manual_seed(num_outputs)
    most = 2 ** (form.bits - 1)
    shape = num_outputs, form.num_groups(in_size)
    return QuantizedWeight(
        format=form,
        values=torch.randint(-most, most, (num_outputs, in_size), generator=generator).to(torch.int8),
        scales=torch.rand(shape, generator=generator) / most,
        offsets=torch.randn(shape, generator=generator) if has_offsets else None,
        multipliers=random_multipliers(form, num_outputs, in_size),
    )


def random_multipliers(form: IntegerFormat, num_outputs: int, in_size: int) -> torch.Tensor | None:
    """Return some of the whole range, at its ends more often than elsewhere."""
    if not form.is_two_level:
        return None
    generator = torch.Generator().manual_seed(in_size)
    shape = num_outputs, form.num_multipliers(in_size)
    return torch.randint(-200, 201, shape, generator=generator).clamp(-127, 127).to(torch.int8)


@every_form
@every_level
@each("dtype", [torch.bfloat16, torch.float16])
def test_products_are_exact_but_for_the_last_roundings(form: IntegerFormat, level: str, dtype: torch.dtype) -> None:
    kernels = make_kernels(level, form, dtype=dtype)
    for num_outputs, in_size in SHAPES:
        for has_offsets in (False, True):
            weight = random_integers(form, num_outputs, in_size, has_offsets=has_offsets)
            x, bias = random(MAX_ROWS, in_size, dtype=dtype), random(num_outputs)
            result = kernels.logits_linear(x, kernels.pack_linear(weight, bias, "plain", form))
            expected = exact_product(x, weight) + bias
            assert result.dtype == torch.float32
            torch.testing.assert_close(result.double(), expected, atol=3e-6 * in_size**0.5, rtol=1e-6)


@every_form
@every_level
def test_a_wrong_integer_is_noticed(form: IntegerFormat, level: str) -> None:
    """The tolerance above is finer than one step of one weight."""
    kernels, weight = make_kernels(level, form), random_integers(form, 37, 84, has_offsets=False)
    x = random(1, 84)
    expected = exact_product(x, weight)
    weight.values[5, 83] ^= 1
    result = kernels.logits_linear(x, kernels.pack_linear(weight, None, "plain", form)).double()
    assert not torch.allclose(result, expected, atol=3e-6 * 84**0.5, rtol=1e-6)


@every_form
@every_level
def test_weights_become_the_nearest_integers(form: IntegerFormat, level: str) -> None:
    weight = random(37, 300)
    weight[3, 100:170] = 0.0
    weight[4] = 0.0
    quantized = make_kernels(level, form).quantize(weight, form)
    most = 127 if form.bits == 8 else 8
    assert quantized.scales.shape == (37, form.num_groups(300))
    assert quantized.values.abs().max() == most
    assert quantized.values.max() <= 2 ** (form.bits - 1) - 1
    error = (quantized.dequantized() - weight.float()).square().mean(dim=1)[:3].sqrt()
    assert (error < (0.011 if form.bits == 8 else 0.14)).all()  # of values of size 1, steps of 1 / 42 and 1 / 2.7
    assert torch.equal(quantized.dequantized()[4], torch.zeros(300))


@every_form
@every_level
def test_packing_a_weight_is_packing_its_integers(form: IntegerFormat, level: str) -> None:
    kernels, weight, x = make_kernels(level, form), random(2 * 37, 84), random(9, 84)
    quantized = kernels.quantize(weight, form)
    assert torch.equal(
        kernels.linear(x, kernels.pack_linear(weight, None)),
        kernels.linear(x, kernels.pack_linear(quantized, None, "plain", form)),
    )
    assert torch.equal(
        kernels.activated_linear(x, kernels.pack_linear(weight, None, "gated"), SILU),
        kernels.activated_linear(x, kernels.pack_linear(quantized, None, "gated", form), SILU),
    )


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_rotation_keeps_what_stands_beside_an_outlier(level: str) -> None:
    """One input of a hundred, far from the others in every row, as the residual stream of language models has it."""
    x, weight = random(32, 512), random(64, 512)
    x[:, 17] = 60.0
    exact = x.double() @ weight.double().T
    errors = []
    for form in (FORMS[0], replace(FORMS[0], rotation="row")):
        kernels = make_kernels(level, form)
        found = kernels.logits_linear(x, kernels.pack_linear(weight, None))
        errors.append(float((found - exact).square().mean().sqrt()))
    assert errors[1] < errors[0] / 3


def test_all_levels_choose_the_same_integers() -> None:
    weight = random(40, 300)
    for form in FORMS:
        [first, *others] = [make_kernels(level, form).quantize(weight, form) for level in ALL_LEVELS]
        for other in others:
            is_exact = form.bits == 8 or form.is_two_level
            assert (first.values != other.values).sum() <= (0 if is_exact else 40)  # a near tie of scales
            torch.testing.assert_close(first.dequantized(), other.dequantized(), atol=0.5, rtol=0)


@pytest.mark.parametrize("levels", [("avx2", "avx2_vnni"), ("avx512_vnni", "avx512")], ids=lambda levels: levels[1])
@every_form
def test_levels_of_the_same_vectors_give_the_same_bits(form: IntegerFormat, levels: tuple[str, str]) -> None:
    """Also where pairs of products come closest to saturating: -128 times -127."""
    if not {*levels} <= {*ALL_LEVELS}:
        pytest.skip("the processor has but one of them, or none")
    weight, x = random_integers(form, 37, 300, has_offsets=False), random(MAX_ROWS, 300)
    if form.bits == 8:
        weight.values[:5] = -128
    x[::3] = -x[::3].abs()
    x[7], x[8, :50] = -1.0, 100.0
    without, by_them = (
        kernels.logits_linear(x, kernels.pack_linear(weight, None, "plain", form))
        for kernels in (make_kernels(level, form) for level in levels)
    )
    assert torch.equal(without, by_them)


def fused_ops(kernels: InOneForm, form: IntegerFormat) -> dict[str, Callable[[slice], torch.Tensor]]:
    """Return every op that reads packed weights, by name, as a function of the rows it computes."""
    size, middle, draw = 84, 100, partial(random, dtype=kernels.dtype)
    x, residual, norm = draw(MAX_ROWS, size), draw(MAX_ROWS, size).flip(0), draw(size)
    wide, gate_up = kernels.pack_linear(draw(middle, size), draw(middle)), draw(2 * middle, size, scale=0.1)
    gated, down = (
        kernels.pack_linear(gate_up, None, "gated"),
        kernels.pack_linear(draw(size, middle, scale=0.1), None),
    )
    return {
        "linear": lambda rows: kernels.linear(x[rows], wide),
        "logits_linear": lambda rows: kernels.logits_linear(x[rows], wide),
        "activated_linear": lambda rows: kernels.activated_linear(x[rows], gated, SILU),
        "normed_linear": lambda rows: torch.cat(
            kernels.normed_linear(x[rows], Fused(residual=residual[rows], norm_weight=norm, eps=1e-5), wide), dim=-1
        ),
        "mlp": lambda rows: torch.cat(
            kernels.mlp(x[rows], Fused(residual=residual[rows], norm_weight=norm, eps=1e-5), gated, down), dim=-1
        ),
    }


@every_form
@every_level
@each("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_independent(form: IntegerFormat, level: str, dtype: torch.dtype) -> None:
    for name, op in fused_ops(make_kernels(level, form, dtype=dtype), form).items():
        whole = op(slice(0, MAX_ROWS))
        for start, size in SOME_ROWS:
            assert torch.equal(op(slice(start, start + size)), whole[start : start + size]), (name, start, size)


@every_form
@every_level
def test_many_rows_are_those_of_few(form: IntegerFormat, level: str) -> None:
    """Several blocks of rows and of k, the last of each not full."""
    kernels, x = make_kernels(level, form), random(300, 1100)
    packed = kernels.pack_linear(random(100, 1100), None)
    whole = kernels.linear(x, packed)
    for start, size in [(0, 1), (127, 2), (250, 50), (299, 1)]:
        assert torch.equal(kernels.linear(x[start : start + size], packed), whole[start : start + size]), (start, size)


@every_form
@every_level
def test_threads_do_not_show(form: IntegerFormat, level: str) -> None:
    one, three = (fused_ops(make_kernels(level, form, num_threads), form) for num_threads in (1, 3))
    for name, op in one.items():
        assert torch.equal(op(slice(0, 33)), three[name](slice(0, 33))), name


@every_level
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_fused_ops_are_their_parts(kind: ActivationKind, level: str) -> None:
    form, activation = FORMS[0], Activation(kind, limit=1.25)
    kernels, x, residual, norm = make_kernels(level, form), random(20, 84), random(20, 84).flip(0), random(84)
    weight = random(200, 84, scale=0.1)
    up = kernels.pack_linear(weight, None, "gated") if activation.is_gated else kernels.pack_linear(weight[:100], None)
    fused = Fused(residual=residual, norm_weight=norm, eps=1e-5, norm_offset=0.5, activation=activation)
    down = kernels.pack_linear(random(84, 100, scale=0.1), None)
    normed, total = kernels.add_rms_norm(x, fused)
    out, stream = kernels.mlp(x, fused, up, down)
    assert torch.equal(stream, total)
    assert torch.equal(out, kernels.linear(kernels.activated_linear(normed, up, activation), down))
    mapped, _ = kernels.normed_linear(x, fused, down_of(kernels))
    assert torch.equal(mapped, kernels.linear(normed, down_of(kernels)))


def down_of(kernels: InOneForm) -> PackedLinear:
    return kernels.pack_linear(random(50, 84), None)


@every_form
@every_level
def test_rows_that_are_not_finite_stay_in_their_row(form: IntegerFormat, level: str) -> None:
    kernels, x = make_kernels(level, form), random(20, 84)
    packed = kernels.pack_linear(random(50, 84), None)
    expected = kernels.linear(x, packed)
    spoilt = x.clone()
    spoilt[3, 7], spoilt[11, 83] = float("nan"), float("-inf")
    result = kernels.linear(spoilt, packed)
    assert result[[3, 11]].isnan().all()
    others = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(result[others], expected[others])


@every_level
def test_rows_far_from_one(level: str) -> None:
    form = FORMS[0]
    kernels, weight = make_kernels(level, form), random(32, 84)
    packed, quantized = kernels.pack_linear(weight, None), kernels.quantize(weight, form)
    x = random(4, 84) * torch.tensor([[0.0], [1e-40], [1e-30], [1e30]], dtype=torch.bfloat16)
    result = kernels.logits_linear(x, packed)
    assert torch.equal(result[:2], torch.zeros(2, 32))  # what is below 2^-120 counts as nothing
    expected = exact_product(x[2:], quantized)
    torch.testing.assert_close(result[2:].double(), expected, rtol=1e-5, atol=1e-32)


@every_level
def test_no_rows_give_no_rows(level: str) -> None:
    kernels = make_kernels(level, FORMS[0])
    assert kernels.linear(random(0, 84), kernels.pack_linear(random(50, 84), None)).shape == (0, 50)


def test_what_cannot_be_had_is_refused_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameterError, match="one of int8, int4, fp8"):
        get_quantization("int3")
    with pytest.raises(InvalidParameterError, match=r"needs a CPU, 16-bit activations, .* here it is cpu with float32"):
        check("int8", "cpu", torch.float32)
    with pytest.raises(InvalidParameterError, match=r"quantization='fp8': .* a CPU has no kernels for 8-bit floats"):
        check("fp8", "cpu", torch.bfloat16)
    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "torch")
    with pytest.raises(InvalidParameterError, match="a GPU and Triton; here it is cuda with bfloat16"):
        check("int4", "cuda", torch.bfloat16)


def check(quantization: str, device: str, dtype: torch.dtype) -> None:
    schemes = make_schemes(None, quantization)
    kernels = select_kernels(torch.device(device), dtype, schemes.forms)
    check_quantization_at_load(schemes, kernels, f"{device} with {str(dtype).removeprefix('torch.')}")


def test_formats_know_their_size() -> None:
    assert IntegerFormat(bits=8, group_size=None).num_bytes(100, 1000) == 100 * 1004
    assert IntegerFormat(bits=4, group_size=128).num_bytes(100, 1000) == 100 * (500 + 8 * 4)
    assert TWO_LEVEL.num_bytes(100, 1000) == 100 * (500 + 32 + 4)
