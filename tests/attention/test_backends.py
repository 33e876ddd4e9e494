"""Every backend computes attention as it is defined, whatever the shape, the batch and the blocks."""

import pytest
import torch
from tests.attention.steps import Pool, Sequence, Shape, exact_attention, run_step

from octavo.attention.selector import select_attention
from octavo.errors import UnknownOptionError

CPU = torch.device("cpu")
# Results are means of values of size 1: float32 keeps 7 digits, bfloat16 rounds weights and result to 1 in 256.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=["tiled", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def assert_exact(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def fill(pool: Pool, sequence: Sequence, stop: int) -> None:
    """Write the first `stop` positions."""
    run_step(pool, [(sequence, 0, stop)])


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 20), (3, 1, 16), (16, 2, 64), (20, 1, 12)])
def test_a_step_of_prompts_chunks_and_decodes(
    backend: str, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    pool = Pool(
        backend, Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    )
    sequences = [pool.sequence(length, seed=length) for length in (1, 37, 64, 65, 150, 201)]
    parts = [
        (sequence, start, len(sequence.query)) for sequence, start in zip(sequences, (0, 0, 63, 64, 90, 0), strict=True)
    ]
    for sequence, start, _ in parts:
        if start:
            fill(pool, sequence, start)
    for result, (sequence, start, _) in zip(run_step(pool, parts), parts, strict=True):
        assert_exact(result, exact_attention(sequence)[start:])


@pytest.mark.parametrize("sliding_window", [1, 7, 64, 100, 500])
def test_a_sliding_window(backend: str, sliding_window: int) -> None:
    pool = Pool(backend, Shape())
    whole, chunk, decode = (pool.sequence(length, seed=length) for length in (130, 170, 140))
    fill(pool, chunk, 101)
    fill(pool, decode, 139)
    parts = [(whole, 0, 130), (chunk, 101, 170), (decode, 139, 140)]
    for result, (sequence, start, _) in zip(run_step(pool, parts, sliding_window=sliding_window), parts, strict=True):
        assert_exact(result, exact_attention(sequence, sliding_window)[start:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scattered", [True, False])
def test_short_dtypes(backend: str, dtype: torch.dtype, scattered: bool) -> None:
    pool = Pool(backend, Shape(dtype=dtype), scattered=scattered)
    prompt, decode = pool.sequence(100, seed=1), pool.sequence(70, seed=2)
    fill(pool, decode, 69)
    first, second = run_step(pool, [(prompt, 0, 100), (decode, 69, 70)])
    assert_exact(first, exact_attention(prompt))
    assert_exact(second, exact_attention(decode)[69:])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("length", [640, 641, 960])
def test_decoding_over_a_long_context(backend: str, dtype: torch.dtype, scattered: bool, length: int) -> None:
    pool = Pool(backend, Shape(num_heads=6, head_dim=20, dtype=dtype), scattered=scattered)
    sequence = pool.sequence(length, seed=length)
    fill(pool, sequence, length - 1)
    [result] = run_step(pool, [(sequence, length - 1, length)])
    assert_exact(result, exact_attention(sequence)[length - 1 :])


def test_blocks_in_order_with_one_pair_swapped(backend: str) -> None:
    """A context whose first and last slot are as far apart as if it lay in one piece, but does not."""
    pool = Pool(backend, Shape(), scattered=False)
    sequence = pool.sequence(80, seed=3)
    sequence.block_ids[1], sequence.block_ids[3] = sequence.block_ids[3], sequence.block_ids[1]
    [result] = run_step(pool, [(sequence, 0, 80)])
    assert_exact(result, exact_attention(sequence))


def test_requests_of_one_step_share_blocks(backend: str) -> None:
    """The second reads a prefix that the first writes in the same step, from the first layer on."""
    pool = Pool(backend, Shape())
    first, second = pool.sequence(40, seed=4), pool.sequence(50, seed=4)
    second.block_ids[:2] = first.block_ids[:2]
    _, result = run_step(pool, [(first, 0, 40), (second, 32, 50)])
    assert_exact(result, exact_attention(second)[32:])


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -1e30])
def test_nothing_leaks_from_slots_of_others(backend: str, rubbish: float) -> None:
    pool = Pool(backend, Shape(), rubbish=rubbish)
    sequences = [pool.sequence(length, seed=length) for length in (5, 67, 130)]
    results = run_step(pool, [(sequence, 0, len(sequence.query)) for sequence in sequences])
    for result, sequence in zip(results, sequences, strict=True):
        assert_exact(result, exact_attention(sequence))


def test_the_tolerance_notices_a_wrong_mask() -> None:
    """One position too many or too few, at the end of a context of 200, is more than the tolerances allow."""
    sequence = Pool("tiled", Shape()).sequence(200, seed=5)
    with pytest.raises(AssertionError):
        assert_exact(exact_attention(sequence, 199).float()[199:], exact_attention(sequence)[199:])


def test_selection() -> None:
    assert select_attention(CPU, torch.float32).is_row_invariant
    assert select_attention(CPU, torch.bfloat16).name == "torch-sdpa"
    with pytest.raises(UnknownOptionError, match="sdpa"):
        select_attention(CPU, torch.float32, "sdap")
