"""Weights in the blocks of GGUF files: every type, at every level, beside its definition in torch.

Legend: T = tokens, N = outputs, K = inputs.
"""

import numpy as np
import pytest
import torch
from tests.breadth import each, pick
from tests.kernels.conftest import native
from tests.kernels.levels import LEVELS

from octavo.gguf.types import GGML_NUMBERS, GGML_TYPES
from octavo.kernels.blocks import BlockFormat, BlockWeight, block_linear, dequantize, integer_groups
from octavo.kernels.native import NativeKernels
from octavo.kernels.types import SILU, Fused, LinearRole

QUANTIZED = [kind.name for kind in GGML_TYPES.values() if kind.is_quantized]
pytestmark = pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
ROWS = pick((1, 3, 5, 37), (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 131))


def rows_of(name: str, num_rows: int, in_size: int, seed: int = 0) -> torch.Tensor:
    """Return random blocks whose values are about as large as weights are."""
    kind = GGML_TYPES[GGML_NUMBERS[name]]
    source = np.random.default_rng(seed)
    blocks = source.integers(0, 256, (num_rows, in_size // kind.block_size, kind.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = source.integers(118, 123, blocks.shape[:2])  # exponents
        return torch.from_numpy(blocks.reshape(num_rows, -1))
    for begin in {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
                  "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(name, (0,)):  # fmt: skip
        halves = source.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., begin : begin + 2] = halves[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_rows, -1))


def weight_of(*parts: tuple[str, int], in_size: int, row_inputs: int | None = None, first: int = 0) -> BlockWeight:
    row_inputs = row_inputs or in_size
    names, sizes = zip(*parts, strict=True)
    form = BlockFormat(types=names, sizes=sizes, row_inputs=row_inputs, first_input=first)
    rows = (rows_of(name, size, row_inputs, seed) for seed, (name, size) in enumerate(parts))
    return BlockWeight(format=form, parts=tuple(rows), in_size=in_size)


def inputs(num_rows: int, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(3))
    x[:, ::37] *= 30.0  # outliers
    return x.to(dtype)


def kernels_of(level: str, dtype: torch.dtype = torch.bfloat16) -> NativeKernels:
    return native(level, 2, dtype)


def check(level: str, weight: BlockWeight, role: LinearRole = "plain") -> None:
    bias = torch.randn(sum(weight.format.sizes))
    for dtype in (torch.bfloat16, torch.float16):
        kernels = kernels_of(level, dtype)
        packed, x = kernels.pack_linear(weight, bias, role, weight.format), inputs(max(ROWS), weight.in_size, dtype)
        whole = kernels.logits_linear(x, packed)
        torch.testing.assert_close(whole, block_linear(x, weight, bias), rtol=1e-5, atol=2e-4)
        for count in ROWS:
            assert torch.equal(kernels.logits_linear(x[:count], packed), whole[:count]), (dtype, count)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_type(name: str, level: str) -> None:
    check(level, weight_of((name, 72), in_size=768))


@pytest.mark.parametrize("name", QUANTIZED)
def test_decoded_rows(name: str) -> None:
    kind = GGML_TYPES[GGML_NUMBERS[name]]
    rows = rows_of(name, 5, 768)
    assert torch.equal(kernels_of(LEVELS[0]).decoded_rows(rows, kind), dequantize(rows, kind))


def test_definition_rounds_activations_only() -> None:
    weight = weight_of(("Q6_K", 8), in_size=256)
    values, scales = integer_groups(inputs(3, 256))
    rounded = (values * scales).view(3, -1).double()
    torch.testing.assert_close(
        block_linear(inputs(3, 256), weight, None).double(),
        rounded @ weight.dequantized().double().T,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_parts_of_several_types(level: str) -> None:
    """Queries and keys of one type, values of another: panels of 32 outputs hold strips of both."""
    check(level, weight_of(("Q4_K", 48), ("Q4_K", 32), ("Q6_K", 16), ("Q5_K", 21), in_size=512))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("parts", [(("Q5_0", 1104), ("Q4_0", 990)), (("Q8_0", 1100),)])
def test_many_outputs(parts: tuple[tuple[str, int], ...], level: str) -> None:
    """Few rows are multiplied by several panels at once, of which all have the same types."""
    check(level, weight_of(*parts, in_size=288))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("types", [("Q4_0", "Q4_0"), ("Q4_K", "Q5_K"), ("Q5_0", "Q2_K"), ("MXFP4", "MXFP4")])
def test_gated(types: tuple[str, str], level: str) -> None:
    kernels, weight = kernels_of(level), weight_of((types[0], 40), (types[1], 40), in_size=512)
    packed = kernels.pack_linear(weight, None, "gated", weight.format)
    x = inputs(9, 512)
    gate, up = block_linear(x, weight, None).to(torch.bfloat16).float().chunk(2, dim=-1)
    found = kernels.activated_linear(x, packed, SILU)
    torch.testing.assert_close(found.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.02)
    for count in (1, 4):
        assert torch.equal(kernels.activated_linear(x[:count], packed, SILU), found[:count])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", pick(["Q4_1", "Q4_K", "Q6_K"], QUANTIZED))
def test_shares_of_inputs(name: str, level: str) -> None:
    """Ranks hold groups, which may begin inside a block of 256: their sums are those of the whole."""
    for first, size in ((0, 288), (288, 480)):
        check(level, weight_of((name, 20), in_size=size, row_inputs=768, first=first))


@pytest.mark.parametrize("level", LEVELS)
def test_rows_that_are_not_finite_spoil_themselves_only(level: str) -> None:
    kernels, weight = kernels_of(level), weight_of(("Q4_K", 32), in_size=256)
    packed = kernels.pack_linear(weight, None, "plain", weight.format)
    x = inputs(4, 256)
    alone = kernels.logits_linear(x[2:3], packed)
    x[1, 7], x[3, 9] = torch.inf, torch.nan
    found = kernels.logits_linear(x, packed)
    assert found[1].isnan().all()
    assert found[3].isnan().all()
    assert torch.equal(found[2:3], alone)


@pytest.mark.parametrize("level", LEVELS)
def test_mlp_and_norm(level: str) -> None:
    """One call for all of an MLP gives the bits of its parts."""
    kernels = kernels_of(level)
    up, down = weight_of(("Q4_K", 256), ("Q4_K", 256), in_size=512), weight_of(("Q6_K", 512), in_size=256)
    packed_up = kernels.pack_linear(up, None, "gated", up.format)
    packed_down = kernels.pack_linear(down, None, "plain", down.format)
    x = inputs(7, 512)
    fused = Fused(residual=inputs(7, 512), norm_weight=torch.rand(512).to(torch.bfloat16), eps=1e-6)
    out, total = kernels.mlp(x, fused, packed_up, packed_down)
    normed, expected_total = kernels.add_rms_norm(x, fused)
    expected = kernels.linear(kernels.activated_linear(normed, packed_up, SILU), packed_down)
    assert torch.equal(total, expected_total)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_argmax(level: str) -> None:
    kernels, weight = kernels_of(level), weight_of(("Q6_K", 2100), in_size=256)
    packed = kernels.pack_linear(weight, None, "logits", weight.format)
    for count in (9, 3):
        x = inputs(9, 256)[:count]
        for outputs, among in ((2100, packed), (1984, kernels.first_outputs(packed, 1984))):
            values, ids = kernels.logits_linear(x, packed)[:, :outputs].max(-1)
            largest, found = kernels.logits_argmax(x, among)
            assert torch.equal(largest, values)
            assert torch.equal(found, ids)


@pytest.mark.parametrize("level", LEVELS)
@each("dtype", [torch.bfloat16, torch.float16])
def test_experts(level: str, dtype: torch.dtype) -> None:
    """All experts in one call give the bits of each one's linears."""
    kernels = kernels_of(level, dtype)
    ups = [weight_of(("Q4_K", 256), ("Q4_K", 256), in_size=512)] * 3
    downs = [weight_of((name, 512), in_size=256) for name in ("Q6_K", "Q4_0", "Q6_K")]
    biases = torch.randn(2, 512).to(dtype)
    packed_ups = [kernels.pack_linear(weight, biases[0], "gated", weight.format) for weight in ups]
    packed_downs = [kernels.pack_linear(weight, biases[1], "plain", weight.format) for weight in downs]
    experts = kernels.pack_experts(packed_ups, packed_downs)
    x, token_ids = inputs(20, 512, dtype) * 0.01, torch.arange(40) % 20  # float16 has an end at 65,504
    expert_ids = torch.arange(40) * 7 % 3
    found = kernels.expert_rows(x, token_ids, expert_ids, experts, SILU)
    for expert in range(3):
        rows = x[token_ids[expert_ids == expert]]
        expected = kernels.linear(kernels.activated_linear(rows, packed_ups[expert], SILU), packed_downs[expert])
        assert torch.equal(found[expert_ids == expert], expected)
    few = kernels.expert_rows(x, token_ids[:5], expert_ids[:5], experts, SILU)
    assert torch.equal(few, found[:5])
