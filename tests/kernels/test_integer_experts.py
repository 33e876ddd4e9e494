"""Experts with weights in integers: what all do at once has the bits of one map after the other, row by row.

Legend: R = pairs of a token and an expert, D = hidden size, I = intermediate size, X = experts.
"""

from functools import partial

import pytest
import torch
from tests.breadth import each
from tests.kernels.levels import LEVELS
from tests.kernels.test_integers import FORMS, TWO_LEVEL, every_form, every_level, make_kernels, random

from octavo.kernels.native import NativeKernels
from octavo.kernels.quantization import IntegerFormat
from octavo.kernels.types import SILU, Fused, PackedExperts, PackedLinear, Routing

SIZE = 84  # D, in no whole groups
MIDDLE_SIZES = [37, 70, 128, 37, 200]  # I of each expert; the last is the shared one
ROUTING = Routing(num_experts=4, top_k=2, renormalizes=True, has_shared=True)

pytestmark = pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")


def experts_of(kernels: NativeKernels) -> PackedExperts:
    draw = partial(random, scale=0.2, dtype=kernels.dtype)
    return kernels.pack_experts(
        [kernels.pack_linear(draw(2 * middle, SIZE), draw(2 * middle), "gated") for middle in MIDDLE_SIZES],
        [kernels.pack_linear(draw(SIZE, middle), draw(SIZE)) for middle in MIDDLE_SIZES],
    )


def router_of(kernels: NativeKernels) -> PackedLinear:
    return kernels.pack_linear(random(ROUTING.num_experts + 1, SIZE, dtype=kernels.dtype), None, "router")


def one_by_one(
    kernels: NativeKernels, x: torch.Tensor, expert_ids: torch.Tensor, experts: PackedExperts
) -> torch.Tensor:
    """Return [R, D]: what expert expert_ids[r] makes of row r of x [R, D], by its two maps alone."""
    linears = [(experts.gate_up[expert], experts.down[expert]) for expert in expert_ids.tolist()]
    rows = [
        kernels.linear(kernels.activated_linear(row[None], up, SILU), down)
        for row, (up, down) in zip(x, linears, strict=True)
    ]
    return torch.cat(rows)


@every_form
@every_level
@each("num_pairs", [1, 6, 130])
def test_rows_are_those_of_the_maps(form: IntegerFormat, level: str, num_pairs: int) -> None:
    """With 130 pairs an expert has several row tiles, and one has no rows at all."""
    kernels = make_kernels(level, form)
    x, experts = random(50, SIZE), experts_of(kernels)
    token_ids = torch.arange(num_pairs) * 7 % 50
    expert_ids = torch.tensor([3, 0, 4, 0, 0, 1])[torch.arange(num_pairs) % 6]
    answers = kernels.expert_rows(x, token_ids, expert_ids, experts, SILU)
    assert torch.equal(answers, one_by_one(kernels, x[token_ids], expert_ids, experts))


@every_form
@every_level
@each(("num_tokens", "dtype"), [(1, torch.bfloat16), (17, torch.bfloat16), (40, torch.float16)])
def test_the_whole_is_its_parts(form: IntegerFormat, level: str, num_tokens: int, dtype: torch.dtype) -> None:
    kernels, draw = make_kernels(level, form, dtype=dtype), partial(random, dtype=dtype)
    x, residual, norm = draw(num_tokens, SIZE), draw(num_tokens + 1, SIZE)[1:], draw(SIZE)
    experts, router = experts_of(kernels), router_of(kernels)
    load = torch.zeros(ROUTING.num_experts, dtype=torch.int64)
    whole, total = kernels.moe(x, Fused(residual=residual, norm_weight=norm, eps=1e-5), router, ROUTING, experts, load)

    normed, expected_total = kernels.add_rms_norm(x, Fused(residual=residual, norm_weight=norm, eps=1e-5))
    routes = kernels.route(normed, router, ROUTING)
    expert_ids = routes.expert_ids.flatten()
    rows = one_by_one(kernels, normed.repeat_interleave(ROUTING.num_choices, dim=0), expert_ids, experts)
    assert torch.equal(total, expected_total)
    parts = kernels.combine_experts(rows.view(num_tokens, ROUTING.num_choices, SIZE), routes.weights)
    assert torch.equal(whole, parts)
    assert torch.equal(load, torch.bincount(expert_ids, minlength=5)[:4])


@every_level
@pytest.mark.parametrize("form", [FORMS[0], TWO_LEVEL], ids=["8-bit", "nested"])
def test_a_row_that_is_not_finite_spoils_no_other(form: IntegerFormat, level: str) -> None:
    kernels = make_kernels(level, form)
    experts, router = experts_of(kernels), router_of(kernels)

    def answers(x: torch.Tensor) -> torch.Tensor:
        load = torch.zeros(ROUTING.num_experts, dtype=torch.int64)
        fused = Fused(residual=torch.zeros_like(x), norm_weight=random(SIZE), eps=1e-5)
        return kernels.moe(x, fused, router, ROUTING, experts, load)[0]

    x = random(9, SIZE)
    expected = answers(x)
    for bad in (float("nan"), float("inf")):
        x[4, 7] = bad
        result = answers(x)
        assert not result[4].isfinite().any()
        assert torch.equal(torch.cat((result[:4], result[5:])), torch.cat((expected[:4], expected[5:])))


@every_level
def test_experts_of_several_forms_are_refused(level: str) -> None:
    """One kind of activations serves all."""
    kernels = make_kernels(level, FORMS[0])
    gate_up = [kernels.pack_linear(random(74, SIZE), None, "gated", form) for form in (FORMS[0], TWO_LEVEL)]
    down = [kernels.pack_linear(random(SIZE, 37), None) for _ in range(2)]
    with pytest.raises(ValueError, match="experts have weights of one form"):
        kernels.pack_experts(gate_up, down)
