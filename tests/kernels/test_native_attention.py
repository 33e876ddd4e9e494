"""The C++ attention against float64, at a tolerance that follows from its roundings, in odd shapes; and NaN in its row.

Legend: C = context positions, H = query heads, G = kv heads, D = head size.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.attention.steps import NATIVE, NATIVE_DTYPES, Pool, Sequence, Shape, exact_attention, run_step
from tests.breadth import each

from octavo.attention.base import HeadNorms

SHAPES = [
    Shape(num_heads=2, num_kv_heads=2, head_dim=16, block_size=32),
    Shape(num_heads=6, num_kv_heads=2, head_dim=20, block_size=16),
    Shape(num_heads=8, num_kv_heads=1, head_dim=40, block_size=64),
    Shape(num_heads=3, num_kv_heads=1, head_dim=64, block_size=8),
    Shape(num_heads=4, num_kv_heads=4, head_dim=80, block_size=32),
    Shape(num_heads=4, num_kv_heads=2, head_dim=128, block_size=32),
    Shape(num_heads=2, num_kv_heads=1, head_dim=256, block_size=96),
]
LENGTH = 301  # 7 times 43
pytestmark = pytest.mark.skipif(not NATIVE, reason="the C++ kernels were not built")


@pytest.fixture(params=NATIVE_DTYPES, ids=str)
def backend(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    name, dtype = request.param
    return name, dtype


@pytest.fixture
def name(backend: tuple[str, torch.dtype]) -> str:
    return backend[0]


@pytest.fixture
def dtype(backend: tuple[str, torch.dtype]) -> torch.dtype:
    return backend[1]


def make_norms(head_dim: int) -> HeadNorms:
    query, key = torch.rand(2, head_dim, generator=torch.Generator().manual_seed(head_dim)) + 0.5
    return HeadNorms(query=query, key=key, eps=1e-6)


def make_table(head_dim: int) -> torch.Tensor:
    """Return the angles of rotation, [C, D / 2]."""
    return torch.outer(torch.arange(LENGTH), 100.0 ** -torch.linspace(0, 1, head_dim // 2))


def exact_heads(x: torch.Tensor, norm: torch.Tensor, eps: float, table: torch.Tensor) -> torch.Tensor:
    """Normalize and rotate x [C, heads, D], rounded at the end to its dtype, as it goes into products."""
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.double()
    cos, sin = (table[: len(x)].float().unsqueeze(1).double() for table in (table.cos(), table.sin()))  # [C, 1, D / 2]
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype).double()


def reference(
    sequence: Sequence, norms: HeadNorms, table: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention is at every position, [C, H, D] in float64, and how far off roundings may put it."""
    repeats, head_dim = sequence.query.shape[1] // sequence.key.shape[1], sequence.query.shape[2]
    query = exact_heads(sequence.query, norms.query, norms.eps, table)
    key = exact_heads(sequence.key, norms.key, norms.eps, table).repeat_interleave(repeats, dim=1)
    value = sequence.value.double().repeat_interleave(repeats, dim=1)
    ahead = torch.arange(len(query)).unsqueeze(1) - torch.arange(len(query))  # [C, C]
    hidden = (ahead < 0) | (ahead >= (window or len(query)))
    scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)  # [H, C, C]
    result = torch.einsum("hqk,khd->qhd", weights, value)
    mean_size = torch.einsum("hqk,khd->qhd", weights, value.abs())
    # Half a unit of the dtype for each weight and for the result, as much again for heads that round the other way; and
    # float32's own noise: a score of D products, of queries and keys of size sqrt(D), moves its weight by as much.
    unit, single = torch.finfo(sequence.query.dtype).eps / 2, torch.finfo(torch.float32).eps
    noise = single * (head_dim**1.5 + len(query))
    return result, unit * (result.abs() + 2 * mean_size) + noise * mean_size


def compute(name: str, shape: Shape, window: int | None = None) -> tuple[Sequence, torch.Tensor]:
    """Return a request and its attention [C, H, D]: a prompt in three chunks, then decodes."""
    pool, norms, table = Pool(name, shape), make_norms(shape.head_dim), make_table(shape.head_dim)
    sequence = pool.sequence(LENGTH, seed=1)
    stops = [0, 33, 160, 290, *range(291, LENGTH + 1)]
    results = [
        run_step(pool, [(sequence, start, stop)], sliding_window=window, norms=norms, table=table)[0]
        for start, stop in pairwise(stops)
    ]
    return sequence, torch.cat(results)


@each("shape", SHAPES)
@each("window", [None, 1, 50])
def test_against_float64(name: str, dtype: torch.dtype, shape: Shape, window: int | None) -> None:
    sequence, result = compute(name, replace(shape, dtype=dtype), window)
    exact, tolerance = reference(sequence, make_norms(shape.head_dim), make_table(shape.head_dim), window)
    assert ((result.double() - exact).abs() <= tolerance).all()


def test_the_tolerance_notices_what_is_wrong(dtype: torch.dtype) -> None:
    """Another window, eps, weight, angle or order of heads is more than roundings explain."""
    shape = replace(SHAPES[5], dtype=dtype)
    sequence = Pool(NATIVE[0], shape).sequence(LENGTH, seed=1)
    norms, table = make_norms(128), make_table(128)
    exact, tolerance = reference(sequence, norms, table, 50)
    mutants = [
        reference(sequence, norms, table, 51),
        reference(sequence, replace(norms, eps=0.1), table, 50),
        reference(sequence, replace(norms, query=norms.key), table, 50),
        reference(sequence, norms, -table, 50),
        reference(replace(sequence, key=sequence.key.flip(1)), norms, table, 50),
    ]
    for mutant, _ in mutants:
        assert ((mutant - exact).abs() > tolerance).any()


@each("poison", [float("nan"), float("inf")])
@each("part", ["query", "key", "value"])
def test_what_is_not_finite_stays_with_those_who_see_it(
    name: str, dtype: torch.dtype, part: str, poison: float
) -> None:
    """One bad token of a prompt: those before it have the same bits as without it, in the same step."""
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=40, block_size=32, dtype=dtype)
    pool = Pool(name, shape)
    clean, bad, neighbor = pool.sequence(90, seed=1), pool.sequence(90, seed=1), pool.sequence(90, seed=1)
    getattr(bad, part)[53, 0, 3] = poison
    expected, result, alongside = run_step(pool, [(sequence, 0, 90) for sequence in (clean, bad, neighbor)])
    assert torch.equal(result[:53], expected[:53])
    assert torch.equal(alongside, expected)
    assert not result[53:54].isfinite().all()
    if part != "query":
        assert not result[54:].isfinite().all()


@each("size", [1e-38, 1e-20, 1e4, 1e18])
def test_sizes_far_from_one(name: str, dtype: torch.dtype, size: float) -> None:
    """Scores that underflow, or that leave one position all the weight: a mean of values all the same."""
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=40, block_size=32, dtype=dtype)
    pool = Pool(name, shape)
    sequence = pool.sequence(70, seed=1)
    sequence.query.mul_(min(size, 1e4) if dtype == torch.float16 else size)  # 65,504 is the most there
    [result] = run_step(pool, [(sequence, 0, 70)])
    values = sequence.value.repeat_interleave(2, dim=1)
    for position in range(70):
        least, most = values[: position + 1].float().aminmax(dim=0)
        slack = 2e-2 * torch.maximum(least.abs(), most.abs())
        assert (result[position].float() <= most + slack).all()
        assert (result[position].float() >= least - slack).all()


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """Return heads [C, G, D] as they are kept: whole numbers up to 127 of the greatest's 127th part."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return ((x.float() / scale).round() * scale).double()


@each("shape", SHAPES)
def test_keys_and_values_kept_as_int8(name: str, dtype: torch.dtype, shape: Shape) -> None:
    """As attention over the rounded keys and values, in prompts and decodes; half the room, but for the scale."""
    pool = Pool(f"{name}+int8", replace(shape, dtype=dtype))
    sequence = pool.sequence(LENGTH, seed=1)
    results = [run_step(pool, [(sequence, start, start + 43)])[0] for start in range(0, LENGTH - LENGTH % 43, 43)]
    kept = replace(sequence, key=rounded_to_int8(sequence.key), value=rounded_to_int8(sequence.value))
    exact = exact_attention(kept)
    # A key at the edge between two whole numbers may go the other way: a 127th of it, in one of its D elements.
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(torch.cat(results).double(), exact, atol=tolerance, rtol=tolerance)
    assert pool.kv_cache.key.dtype == torch.int8
    assert pool.kv_cache.key.shape[-1] == -(-shape.head_dim // 32) * 32 + 4
    with pytest.raises(AssertionError):
        torch.testing.assert_close(exact_attention(sequence), exact, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NATIVE)
def test_nan_stays_in_its_row_as_int8(name: str) -> None:
    pool = Pool(f"{name}+int8", Shape(num_heads=4, num_kv_heads=2, head_dim=40, block_size=32, dtype=torch.bfloat16))
    clean, bad = pool.sequence(90, seed=1), pool.sequence(90, seed=1)
    bad.value[53, 0, 3] = torch.nan
    expected, result = run_step(pool, [(sequence, 0, 90) for sequence in (clean, bad)])
    assert torch.equal(result[:53], expected[:53])
    assert result[53:, :2].isnan().all()
