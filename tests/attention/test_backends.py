"""Every backend matches the reference for any shape, batch and block layout."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.attention.steps import NATIVE, NATIVE_DTYPES, Pool, Sequence, Shape, exact_attention, run_step
from tests.breadth import each, pick

from octavo.attention.selector import select_attention
from octavo.errors import InvalidParameterError, UnknownOptionError, UnsupportedModelError
from octavo.kernels.dispatch import native_kernels

CPU = torch.device("cpu")
# Results are means of values of size 1: float32 keeps 7 digits, bfloat16 rounds weights and result to 1 in 256.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Backend:
    """A backend by name, and a dtype that it is for."""

    name: str
    dtype: torch.dtype

    def pool(self, *, rubbish: float = 1e4, scattered: bool = True, **shape: Any) -> Pool:
        return Pool(self.name, Shape(dtype=self.dtype, **shape), rubbish=rubbish, scattered=scattered)


BACKENDS = [Backend(name, dtype) for name in ("tiled", "sdpa") for dtype in (torch.float32, torch.bfloat16)]
BACKENDS += [Backend(name, dtype) for name, dtype in NATIVE_DTYPES]


@pytest.fixture(params=BACKENDS, ids=lambda case: f"{case.name}-{case.dtype}".replace("torch.", ""))
def backend(request: pytest.FixtureRequest) -> Backend:
    case: Backend = request.param
    return case


def assert_exact(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def fill(pool: Pool, sequence: Sequence, stop: int) -> None:
    """Write the first `stop` positions."""
    run_step(pool, [(sequence, 0, stop)])


HEADS = [(2, 2, 20), (3, 1, 16), (16, 2, 64), (20, 1, 12)]


@each(
    ("heads", "block_size"),
    pick(list(zip(HEADS, (8, 32, 8, 32), strict=True)), list(product(HEADS, (8, 16, 32, 128)))),
)
def test_a_step_of_prompts_chunks_and_decodes(backend: Backend, heads: tuple[int, int, int], block_size: int) -> None:
    num_heads, num_kv_heads, head_dim = heads
    pool = backend.pool(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    sequences = [pool.sequence(length, seed=length) for length in (1, 37, 64, 65, 150, 201)]
    parts = [
        (sequence, start, len(sequence.query)) for sequence, start in zip(sequences, (0, 0, 63, 64, 90, 0), strict=True)
    ]
    for sequence, start, _ in parts:
        if start:
            fill(pool, sequence, start)
    for result, (sequence, start, _) in zip(run_step(pool, parts), parts, strict=True):
        assert_exact(result, exact_attention(sequence, start=start))


@each("sliding_window", [1, 7, 64, 100, 500])
def test_a_sliding_window(backend: Backend, sliding_window: int) -> None:
    pool = backend.pool()
    whole, chunk, decode = (pool.sequence(length, seed=length) for length in (130, 170, 140))
    fill(pool, chunk, 101)
    fill(pool, decode, 139)
    parts = [(whole, 0, 130), (chunk, 101, 170), (decode, 139, 140)]
    for result, (sequence, start, _) in zip(run_step(pool, parts, sliding_window=sliding_window), parts, strict=True):
        assert_exact(result, exact_attention(sequence, sliding_window, start=start))


def test_a_scale_of_its_own(backend: Backend) -> None:
    """Twice the queries at half the scale: powers of two change no bit."""
    pool = backend.pool(num_heads=4, num_kv_heads=2, head_dim=64)
    sequence = pool.sequence(70, seed=1)
    twice = replace(sequence, query=2 * sequence.query)
    [plain] = run_step(pool, [(sequence, 0, 70)])
    [halved] = run_step(pool, [(twice, 0, 70)], scale=0.5 * 64**-0.5)
    assert torch.equal(halved, plain)


@pytest.mark.parametrize("name", ["tiled", "sdpa"])
@each("scattered", [True, False])
def test_float16(name: str, scattered: bool) -> None:
    pool = Pool(name, Shape(dtype=torch.float16), scattered=scattered)
    prompt, decode = pool.sequence(100, seed=1), pool.sequence(70, seed=2)
    fill(pool, decode, 69)
    first, second = run_step(pool, [(prompt, 0, 100), (decode, 69, 70)])
    assert_exact(first, exact_attention(prompt))
    assert_exact(second, exact_attention(decode)[69:])


@each(
    ("scattered", "length"),
    pick([(True, 640), (True, 641), (False, 960)], list(product((True, False), (640, 641, 960)))),
)
def test_decoding_over_a_long_context(backend: Backend, scattered: bool, length: int) -> None:
    pool = backend.pool(num_heads=6, head_dim=20, scattered=scattered)
    sequence = pool.sequence(length, seed=length)
    fill(pool, sequence, length - 1)
    [result] = run_step(pool, [(sequence, length - 1, length)])
    assert_exact(result, exact_attention(sequence, start=length - 1))


def test_blocks_in_order_with_one_pair_swapped(backend: Backend) -> None:
    """A context whose first and last slot are as far apart as if it lay in one piece, but does not."""
    pool = backend.pool(scattered=False)
    sequence = pool.sequence(80, seed=3)
    sequence.block_ids[1], sequence.block_ids[3] = sequence.block_ids[3], sequence.block_ids[1]
    [result] = run_step(pool, [(sequence, 0, 80)])
    assert_exact(result, exact_attention(sequence))


def test_requests_of_one_step_share_blocks(backend: Backend) -> None:
    """The second reads a prefix that the first writes in the same step, from the first layer on."""
    pool = backend.pool()
    first, second = pool.sequence(40, seed=4), pool.sequence(50, seed=4)
    second.block_ids[:2] = first.block_ids[:2]
    _, result = run_step(pool, [(first, 0, 40), (second, 32, 50)])
    assert_exact(result, exact_attention(second)[32:])


@each("rubbish", [float("nan"), float("inf"), -1e30])
def test_nothing_leaks_from_slots_of_others(backend: Backend, rubbish: float) -> None:
    pool = backend.pool(rubbish=max(rubbish, torch.finfo(backend.dtype).min))
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
    kernels = native_kernels()  # None where they were not built, or OCTAVO_CPU_LEVEL says so
    assert select_attention(CPU, torch.float32).is_batch_invariant
    assert select_attention(CPU, torch.float32).name == (kernels.name if kernels else "torch-tiled")
    assert select_attention(CPU, torch.bfloat16).name == (kernels.name if kernels else "torch-sdpa")
    assert select_attention(CPU, torch.float16).name == (kernels.name if kernels else "torch-sdpa")
    with pytest.raises(UnknownOptionError, match="sdpa"):
        select_attention(CPU, torch.float32, "sdap")
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype='int8'"):
        select_attention(CPU, torch.float16, "sdpa", kv_cache_dtype="int8")
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype='bf16'"):
        select_attention(CPU, torch.float32, kv_cache_dtype="bf16")


@pytest.mark.skipif(not NATIVE, reason="the C++ kernels were not built")
def test_heads_too_large_for_the_native_backend() -> None:
    with pytest.raises(UnsupportedModelError, match=r"head_dim=578.* at most 576"):
        select_attention(CPU, torch.bfloat16, "native").kv_layout(578)
