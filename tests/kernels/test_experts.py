"""Choosing experts: ties, rows that are not finite, what is counted, and the whole beside its parts."""

import pytest
import torch
from tests.breadth import each
from tests.kernels.conftest import FAST

from octavo.kernels.reference import Kernels
from octavo.kernels.types import SILU, Fused, PackedExperts, Routing

SIZE, NUM_EXPERTS = 40, 6
ROUTING = Routing(num_experts=NUM_EXPERTS, top_k=2, renormalizes=True, has_shared=False)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts_of(kernels: Kernels, dtype: torch.dtype) -> PackedExperts:
    return kernels.pack_experts(
        [kernels.pack_linear(random(64, SIZE, dtype=dtype, seed=i) / 6, None, "gated") for i in range(NUM_EXPERTS)],
        [kernels.pack_linear(random(SIZE, 32, dtype=dtype, seed=i) / 6, None) for i in range(NUM_EXPERTS)],
    )


def moe(kernels: Kernels, x: torch.Tensor, router: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    norm, dtype = torch.ones(SIZE, dtype=x.dtype), x.dtype
    packed = kernels.pack_linear(router, None, "router")
    fused = Fused(residual=torch.zeros_like(x), norm_weight=norm, eps=1e-6)
    return kernels.moe(x, fused, packed, ROUTING, experts_of(kernels, dtype), load)[0]


def test_equal_logits_go_to_the_lower_number(fast_and_dtype: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = fast_and_dtype
    weight = random(NUM_EXPERTS, SIZE, dtype=dtype)
    weight[4] = weight[2] = weight[5]
    x = random(64, SIZE, dtype=dtype, seed=1)
    routes = kernels.route(x, kernels.pack_linear(weight, None, "router"), ROUTING)
    first, second = routes.expert_ids.T
    has_tie = (first == 2) | (first == 4) | (first == 5)
    assert has_tie.sum() > 5
    assert (first[has_tie] == 2).all()
    assert (second[has_tie] == 4).all()
    torch.testing.assert_close(routes.weights[has_tie], torch.full_like(routes.weights[has_tie], 0.5))
    zeros = kernels.route(torch.zeros_like(x), kernels.pack_linear(weight, None, "router"), ROUTING)
    assert zeros.expert_ids.tolist() == [[0, 1]] * 64


def test_a_row_that_is_not_finite_spoils_no_other(fast_and_dtype: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = fast_and_dtype
    router, load = random(NUM_EXPERTS, SIZE, dtype=dtype), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    x = random(9, SIZE, dtype=dtype, seed=1)
    expected = moe(kernels, x, router, load)
    for bad in (float("nan"), float("inf")):
        x[4, 7] = bad
        result = moe(kernels, x, router, load)
        assert not result[4].isfinite().any()
        assert torch.equal(torch.cat((result[:4], result[5:])), torch.cat((expected[:4], expected[5:])))


def test_load_adds_up(fast_and_dtype: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = fast_and_dtype
    router, x = random(NUM_EXPERTS, SIZE, dtype=dtype), random(70, SIZE, dtype=dtype, seed=1)
    load = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    moe(kernels, x, router, load)
    ids = kernels.route(
        kernels.rms_norm(x, torch.ones(SIZE, dtype=dtype), 1e-6), kernels.pack_linear(router, None, "router"), ROUTING
    )
    once = torch.bincount(ids.expert_ids.flatten(), minlength=NUM_EXPERTS)
    assert torch.equal(load, once)
    moe(kernels, x[:1], router, load)
    assert load.sum() == 142


@each("num_tokens", [1, 17, 40])
def test_the_whole_is_its_parts(num_tokens: int, fast_and_dtype: tuple[Kernels, torch.dtype]) -> None:
    """What one op does at once has the bits of its steps: ranks that share the experts compute those."""
    kernels, dtype = fast_and_dtype
    if not kernels.is_batch_invariant:
        pytest.skip(f"{kernels.name} does not promise it")
    router, x = random(NUM_EXPERTS, SIZE, dtype=dtype), random(num_tokens, SIZE, dtype=dtype, seed=1)
    experts, load = experts_of(kernels, dtype), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    whole = moe(kernels, x, router, load)
    fused = Fused(residual=torch.zeros_like(x), norm_weight=torch.ones(SIZE, dtype=dtype), eps=1e-6)
    normed, _ = kernels.add_rms_norm(x, fused)
    routes = kernels.route(normed, kernels.pack_linear(router, None, "router"), ROUTING)
    pairs = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(2))
    rows = torch.empty(2 * num_tokens, SIZE, dtype=dtype)
    rows[pairs] = kernels.expert_rows(normed, pairs // 2, routes.expert_ids.flatten()[pairs], experts, SILU)
    assert torch.equal(kernels.combine_experts(rows.view(num_tokens, 2, SIZE), routes.weights), whole)


def test_there_are_kernels_to_test() -> None:
    assert len(FAST) >= 3
