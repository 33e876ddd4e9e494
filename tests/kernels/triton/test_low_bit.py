"""Weights of few bits in Triton: the reference's products for every form, and the same bits for a row in any batch.

Legend: T = rows, K = input size, N = output size.
"""

from dataclasses import replace

import pytest
import torch
from tests.breadth import pick
from tests.kernels.triton.device import DEVICE

from octavo.kernels.quantization import Float8Format, IntegerFormat, PlainFormat, QuantizedWeight, Rotation, rotated
from octavo.kernels.quantize import integer_rows, quantize, quantized_linear, weight_only_linear
from octavo.kernels.triton import matmul as module
from octavo.kernels.triton.integer_rows import IntegerRows
from octavo.kernels.triton.integer_rows import integer_rows as fast_integer_rows
from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.triton.low_bit_weight import pack_low_bit as pack
from octavo.kernels.triton.matmul import low_bit_linear, split_size
from octavo.kernels.triton.matmul import weight_only_linear as fast_weight_only_linear
from octavo.kernels.types import SILU, Activation, Fused

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TWO_LEVEL, FLOATS = IntegerFormat(bits=4, group_size=None, is_two_level=True), Float8Format()
FLOATS_IN_GROUPS = Float8Format(group_size=128)
INTEGERS = [*(IntegerFormat(bits=bits, group_size=size) for bits in (8, 4) for size in (None, 32, 64, 128)), TWO_LEVEL]
ROTATED = [replace(INTEGERS[0], rotation="row"), replace(TWO_LEVEL, rotation="blocks")]
ROTATIONS: list[Rotation | None] = [None, "blocks", "row"]
SHAPES = [(37, 84), (130, 400)]  # N, K


def form_name(form: PlainFormat) -> str:
    if isinstance(form, Float8Format):
        return f"e4m3-{form.group_size}" if form.group_size else "e4m3"
    name = "two-level" if form.is_two_level else f"{form.bits}-bit-{form.group_size}"
    return name + "-rotated" * (form.rotation is not None)


every_integer_form = pytest.mark.parametrize("form", INTEGERS, ids=form_name)
every_form = pytest.mark.parametrize("form", [*INTEGERS, FLOATS, FLOATS_IN_GROUPS], ids=form_name)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def random_weight(form: PlainFormat, shape: tuple[int, int], *, has_offsets: bool) -> QuantizedWeight:
    weight = quantize(random(*shape) * shape[1] ** -0.5, FLOATS if isinstance(form, Float8Format) else form)
    if weight.format != form:  # floats of checkpoints, in groups
        factors = 1.0 + random(shape[0], form.num_groups(shape[1])).abs()
        weight = replace(weight, format=form, scales=weight.scales * factors)
    return replace(weight, offsets=random(*weight.scales.shape) * 0.01 if has_offsets else None)


@every_form
@pytest.mark.parametrize(("num_rows", "shape", "has_offsets"), [(1, (70, 84), True), (17, (37, 300), False)], ids=str)
def test_products_are_the_reference_s(
    form: PlainFormat, num_rows: int, shape: tuple[int, int], has_offsets: bool
) -> None:
    weight = random_weight(form, shape, has_offsets=has_offsets)
    x, bias = random(num_rows, shape[1]), random(shape[0])
    packed = pack(weight, bias)
    found = fast_weight_only_linear(x, packed, torch.float32, one_tiling=False)
    torch.testing.assert_close(found, weight_only_linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    if isinstance(form, IntegerFormat):
        assert_integer_product(x, weight, bias)


@pytest.mark.parametrize("form", ROTATED, ids=form_name)
def test_products_of_rotated_weights_are_the_reference_s(form: IntegerFormat) -> None:
    assert_integer_product(random(17, 300), random_weight(form, (37, 300), has_offsets=False), random(37))


def assert_integer_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor) -> None:
    found = low_bit_linear(x, pack(weight, bias), torch.float32, one_tiling=False)
    torch.testing.assert_close(found, quantized_linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@every_form
def test_a_wrong_number_is_noticed(form: PlainFormat) -> None:
    """The tolerance above is finer than one step of one weight."""
    weight = random_weight(form, (37, 84), has_offsets=False)
    x = random(1, 84)
    expected = weight_only_linear(x, weight, None)
    weight.values.view(torch.int8)[5, 83] ^= 1
    found = fast_weight_only_linear(x, pack(weight, None), torch.float32, one_tiling=False)
    differs = ~torch.isclose(found, expected, rtol=1e-5, atol=1e-5)
    assert differs.nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("form", [INTEGERS[0], TWO_LEVEL, FLOATS], ids=form_name)
def test_halves_are_multiplied_as_they_are(form: PlainFormat, dtype: torch.dtype) -> None:
    """Factors are exact in 16 bits, and only the result is rounded to them."""
    weight, x = random_weight(form, (37, 84), has_offsets=False), random(3, 84, dtype=dtype)
    found = fast_weight_only_linear(x, pack(weight, None), dtype, one_tiling=False)
    expected = weight_only_linear(x, weight, None)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("form", [INTEGERS[6], ROTATED[0], FLOATS, *pick([], [INTEGERS[0], TWO_LEVEL])], ids=form_name)
def test_a_row_has_its_bits_in_any_batch(form: PlainFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever tiling computes it, and whether or not splits have programs of their own."""
    weight, x = random_weight(form, (40, 300), has_offsets=False), random(66, 300, dtype=torch.bfloat16)
    packed = pack(weight, random(40))

    def compute(rows: slice) -> torch.Tensor:
        return low_bit_linear(x[rows], packed, torch.float32, one_tiling=True)

    whole = compute(slice(0, 66))
    for start, stop in [(0, 1), (64, 66), (0, 17)]:
        assert torch.equal(compute(slice(start, stop)), whole[start:stop])
    monkeypatch.setattr(module, "_MAX_SOME", 17)
    assert torch.equal(compute(slice(0, 66)), whole)
    split = split_size(40, 300)
    assert split < 300
    monkeypatch.setattr(module, "_PROGRAMS", 0)  # never apart; splits stay as they were
    monkeypatch.setattr(module, "split_size", lambda *_: split)
    assert torch.equal(compute(slice(0, 66)), whole)


def test_rows_become_the_reference_s_integers() -> None:
    x = random(7, 300)
    x[1], x[2, 7], x[3, 299] = 0.0, float("nan"), float("-inf")
    x[4] *= 1e-38
    x[5] = torch.arange(300, device=DEVICE) - 149.5
    x[5, 0] = 254.0  # halves of steps: ties
    in_threes = random(3, 590)  # 9 blocks, and a rest
    assert_rows(fast_integer_rows(in_threes, 640, "row"), rotated(in_threes, "row"))
    for dtype in DTYPES:
        for rotation in ROTATIONS:
            rows = fast_integer_rows(x.to(dtype), 384, rotation)
            assert_rows(rows, rotated(x.to(dtype).float(), rotation) if rotation else x.to(dtype))
            assert not rows.values[:, 300:].any()
            assert rows.scales.isnan().tolist() == [False, False, True, True, False, False, False]


def assert_rows(rows: IntegerRows, x: torch.Tensor) -> None:
    expected, expected_scales = integer_rows(x)
    if DEVICE.type == "cuda" and x.dtype == torch.float32:  # a compiled sum over a row has the order of its layout
        torch.testing.assert_close(rows.scales, expected_scales.flatten(), rtol=1e-6, atol=0.0, equal_nan=True)
        assert (rows.values[:, : x.shape[1]] - expected).abs().max() <= 1
        return
    assert torch.equal(rows.values[:, : x.shape[1]], expected)
    assert torch.equal(rows.scales.nan_to_num(-1.0), expected_scales.flatten().nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_gates_before_integers_are_those_that_are_ops(dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(5, 256, dtype=dtype),
        random(256, 5, dtype=dtype).T.contiguous(),
        random(256, dtype=dtype),
    )
    kernels = TritonKernels()
    fused = Fused(residual=residual, norm_weight=weight, eps=1e-6, norm_offset=0.5)
    normed, total = kernels.add_rms_norm(x, fused)
    rows = fast_integer_rows(x, 256, None, fused=fused)
    assert torch.equal(rows.total, total)
    assert_rows(rows, normed)
    rows = fast_integer_rows(x, 256, None, fused=replace(fused, residual=None))
    assert_rows(rows, kernels.rms_norm(x, weight, 1e-6, 0.5))
    assert rows.total is x
    gate_up = torch.cat((x[:, :84], residual[:, :84]), dim=1)
    for activation in (SILU, Activation("clamped_swiglu", limit=1.25), Activation("relu2")):
        rows = fast_integer_rows(gate_up, 256, None, activation=activation)
        assert_rows(rows, kernels.activate(gate_up, activation))


def test_rows_that_are_not_finite_stay_in_their_row() -> None:
    packed = pack(random_weight(INTEGERS[0], (37, 84), has_offsets=False), None)
    x = random(3, 84)
    x[1, 5] = float("inf")
    found = low_bit_linear(x, packed, torch.float32, one_tiling=False)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], low_bit_linear(x[[0, 2]], packed, torch.float32, one_tiling=False))


def test_no_rows_are_no_rows() -> None:
    packed = pack(random_weight(TWO_LEVEL, (37, 84), has_offsets=False), None)
    assert low_bit_linear(random(0, 84), packed, torch.bfloat16, one_tiling=False).shape == (0, 37)


@pytest.mark.parametrize("shape", [(1024, 2048), (6144, 1024), (151936, 1024), (4096, 12288), (1, 128)])
def test_splits_fill_a_gpu_with_one_tile_of_rows(shape: tuple[int, int]) -> None:
    split, tiles = split_size(*shape), -(-shape[0] // 64)
    assert split % 128 == 0
    num_programs = tiles * -(-shape[1] // split)
    assert num_programs <= max(tiles, 256)
    assert num_programs >= 128 or split == 128
