"""Batch-invariant backends: a request has the same bits in any batch and with any chunking."""

from dataclasses import replace
from functools import lru_cache
from random import Random

import pytest
import torch
from tests.attention.steps import NATIVE, NATIVE_DTYPES, Pool, Sequence, Shape, make_backend, make_batch, run_step
from tests.breadth import each, pick

from octavo.attention import torch_tiled
from octavo.attention.native import cut_into_row_blocks

SHAPES = [
    Shape(),
    Shape(num_heads=3, num_kv_heads=1, head_dim=20, block_size=8),
    Shape(num_heads=16, num_kv_heads=2, head_dim=64),
    Shape(num_heads=40, num_kv_heads=2, head_dim=12),
    *pick([], [Shape(num_heads=2, num_kv_heads=2, head_dim=128), Shape(num_heads=1, num_kv_heads=1, head_dim=32)]),
]
LENGTH = 150
BACKENDS = [("tiled", torch.float32), *NATIVE_DTYPES]
BACKENDS += [(f"{name}+int8", torch.bfloat16) for name in NATIVE]


@pytest.fixture(params=BACKENDS, ids=lambda param: f"{param[0]}-{param[1]}".replace("torch.", ""))
def backend(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """A backend's name, and a dtype."""
    name, dtype = request.param
    return name, dtype


@pytest.fixture
def name(backend: tuple[str, torch.dtype]) -> str:
    return backend[0]


@pytest.fixture
def plain(backend: tuple[str, torch.dtype]) -> Shape:
    return Shape(dtype=backend[1])


def name_of(shape: Shape) -> str:
    return f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}"


@pytest.fixture(params=pick([SHAPES[0], SHAPES[1], SHAPES[3]], SHAPES), ids=name_of)
def shape(request: pytest.FixtureRequest, backend: tuple[str, torch.dtype]) -> Shape:
    shape: Shape = request.param
    return replace(shape, dtype=backend[1])


@pytest.fixture(params=[None, 40])
def sliding_window(request: pytest.FixtureRequest) -> int | None:
    window: int | None = request.param
    return window


@pytest.fixture(
    params=pick(
        [(SHAPES[0], None), (SHAPES[1], 40), (SHAPES[3], 40)],
        [(shape, window) for shape in SHAPES for window in (None, 40)],
    ),
    ids=lambda both: f"{name_of(both[0])}-{both[1]}",
)
def layer(request: pytest.FixtureRequest, backend: tuple[str, torch.dtype]) -> tuple[Shape, int | None]:
    """A shape, and a sliding window."""
    shape, window = request.param
    return replace(shape, dtype=backend[1]), window


@lru_cache(maxsize=64)
def alone(name: str, shape: Shape, sliding_window: int | None, seed: int = 1, length: int = LENGTH) -> torch.Tensor:
    """Return the request computed in one step by itself, [length, H, D]."""
    pool = Pool(name, shape)
    [result] = run_step(pool, [(pool.sequence(length, seed), 0, length)], sliding_window=sliding_window)
    return result


@each("chunk", pick([1, 31, 64], [1, 2, 7, 31, 64, 65, 149]))
def test_chunked_is_whole(name: str, layer: tuple[Shape, int | None], chunk: int) -> None:
    shape, sliding_window = layer
    pool, length = Pool(name, shape), min(LENGTH, chunk * pick(35, LENGTH))
    sequence = pool.sequence(LENGTH, seed=1)
    results = [
        run_step(pool, [(sequence, start, min(start + chunk, length))], sliding_window=sliding_window)[0]
        for start in range(0, length, chunk)
    ]
    assert torch.equal(torch.cat(results), alone(name, shape, sliding_window)[:length])


def test_among_strangers(name: str, layer: tuple[Shape, int | None]) -> None:
    """Decode the second half next to prompts and decodes that arrive, grow and finish."""
    shape, sliding_window = layer
    pool = Pool(name, shape)
    sequence = pool.sequence(LENGTH, seed=1)
    strangers = [pool.sequence(200, seed=10 + number) for number in range(5)]
    results = run_step(pool, [(strangers[0], 0, 77), (sequence, 0, 100)], sliding_window=sliding_window)[1:]
    for position in range(100, pick(112, LENGTH)):
        parts: list[tuple[Sequence, int, int]] = [(sequence, position, position + 1)]
        parts += [(stranger, 0, 1 + position - 90) for stranger in strangers[: position % 5]]
        parts += [(strangers[4], 100, 101)] * (position % 2)
        where = position % len(parts)
        parts[0], parts[where] = parts[where], parts[0]
        results.append(run_step(pool, parts, sliding_window=sliding_window)[where])
    done = torch.cat(results)
    assert torch.equal(done, alone(name, shape, sliding_window)[: len(done)])


@each("num_heads", [4, 72])  # 2 and 36 rows of a token and kv head
def test_answers_to_some_tokens(plain: Shape, name: str, num_heads: int, sliding_window: int | None) -> None:
    """Keys and values of all tokens are stored, and the kept outputs have the same bits as if all were computed."""
    shape = replace(plain, num_heads=num_heads, num_kv_heads=2)
    outs = []
    for kept in (None, [2, 99, 100, 101, 131], list(range(90, 132))):
        pool = Pool(name, shape)
        first, second, third = (pool.sequence(LENGTH, seed=seed) for seed in (1, 2, 3))
        run_step(pool, [(second, 0, 60)], sliding_window=sliding_window)
        step = [(first, 0, 100), (second, 60, 61), (third, 0, 31)]
        answers = torch.cat(run_step(pool, step, sliding_window=sliding_window, kept=kept))
        later = torch.cat(run_step(pool, [(first, 100, 102), (third, 31, 40)], sliding_window=sliding_window))
        outs.append((kept, answers, later))
    _, answers, later = outs[0]
    for kept, some, after in outs[1:]:
        assert torch.equal(some[kept], answers[kept])
        assert torch.equal(after, later)


def test_many_alike_in_one_step(name: str, shape: Shape) -> None:
    """Decodes are computed together: each as if by itself, in every place of the batch."""
    pool = Pool(name, shape)
    sequences = [pool.sequence(LENGTH - 5 * number, seed=1) for number in range(9)]
    run_step(pool, [(sequence, 0, len(sequence.query) - 1) for sequence in sequences])
    parts = [(sequence, len(sequence.query) - 1, len(sequence.query)) for sequence in sequences]
    expected = alone(name, shape, None)
    for result, (_, start, stop) in zip(run_step(pool, parts), parts, strict=True):
        assert torch.equal(result, expected[start:stop])


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=str)
@each("num_heads", [8, 24])
def test_heads_taken_together_do_not_show(backend: tuple[str, torch.dtype], num_heads: int) -> None:
    """One thread with many decodes takes several kv heads of a block at a time, as many as fit into a tile of rows."""
    name, dtype = backend
    shape = Shape(num_heads=num_heads, num_kv_heads=8, head_dim=64, block_size=32, dtype=dtype)
    pool = Pool(name, shape, num_threads=1)
    sequences = [pool.sequence(301 - 17 * number, seed=1) for number in range(9)]
    run_step(pool, [(sequence, 0, len(sequence.query) - 1) for sequence in sequences])
    parts = [(sequence, len(sequence.query) - 1, len(sequence.query)) for sequence in sequences]
    expected = alone(name, shape, None, length=301)
    for result, (_, start, stop) in zip(run_step(pool, parts), parts, strict=True):
        assert torch.equal(result, expected[start:stop])


def test_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tiled backend gathers at once is limited, and where the cut falls does not show."""
    pool = Pool("tiled", Shape())
    sequences = [pool.sequence(LENGTH, seed=1) for _ in range(5)]
    parts = [(sequence, 0, LENGTH) for sequence in sequences]
    monkeypatch.setattr(torch_tiled, "_MAX_POSITIONS", 400)
    assert [len(group.tokens) for group in pool.backend.plan(make_batch(16, parts))] == [2, 2, 1]
    for result in run_step(pool, parts):
        assert torch.equal(result, alone("tiled", Shape(), None))


@each("block_size", [4, 8, 32, 48, 128])
def test_blocks_do_not_show(name: str, plain: Shape, block_size: int) -> None:
    pool = Pool(name, replace(plain, block_size=block_size), scattered=False)
    [result] = run_step(pool, [(pool.sequence(LENGTH, seed=1), 0, LENGTH)])
    assert torch.equal(result, alone(name, plain, None))


@each("num_threads", [1, 3])
def test_threads_do_not_show(name: str, plain: Shape, num_threads: int) -> None:
    expected = alone(name, plain, None)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        pool = Pool(name, plain, num_threads=num_threads)
        [result] = run_step(pool, [(pool.sequence(LENGTH, seed=1), 0, LENGTH)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=str)
@each(
    ("block_size", "window"),
    pick([(32, None), (48, 1300)], [(size, window) for size in (32, 48) for window in (None, 1300)]),
)
def test_threads_that_share_a_context_do_not_show(
    backend: tuple[str, torch.dtype], block_size: int, window: int | None
) -> None:
    """Spans of a context much longer than the others are computed by all threads; one thread never splits it."""
    name, dtype = backend
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=40, block_size=block_size, num_blocks=80, dtype=dtype)
    pool = Pool(name, shape, num_threads=1)
    long, short = pool.sequence(2000, seed=1), pool.sequence(150, seed=2)
    run_step(pool, [(long, 0, 1990), (short, 0, 100)], sliding_window=window)
    steps: list[list[tuple[Sequence, int, int]]] = [
        [(long, 1990, 1991)],
        [(short, 100, 101), (long, 1990, 1991)],
        [(long, 1990, 1995), (short, 100, 141)],
    ]
    for parts in steps:
        pool.backend = make_backend(name, dtype, num_threads=1)
        expected = run_step(pool, parts, sliding_window=window)
        for num_threads in pick((2, 7), (2, 4, 7)):
            pool.backend = make_backend(name, dtype, num_threads=num_threads)
            for result, whole in zip(run_step(pool, parts, sliding_window=window), expected, strict=True):
                assert torch.equal(result, whole)


@each("rubbish", [float("nan"), float("inf"), 0.0])
def test_rubbish_changes_no_bit(name: str, plain: Shape, rubbish: float) -> None:
    pool = Pool(name, plain, rubbish=rubbish)
    [result] = run_step(pool, [(pool.sequence(LENGTH, seed=1), 0, LENGTH)])
    assert torch.equal(result, alone(name, plain, None))


def test_random_steps(backend: tuple[str, torch.dtype]) -> None:
    """Long requests, cut at random, in random company: each row as if computed alone in one step."""
    name, dtype = backend
    shape = Shape(num_heads=8, num_kv_heads=4, head_dim=40, block_size=32, num_blocks=400, dtype=dtype)
    length, random = pick(400, 700), Random(5)
    expected = {seed: alone(name, shape, None, seed, length) for seed in range(4)}
    pool = Pool(name, shape)
    sequences, done = [pool.sequence(length, seed) for seed in range(4)], [0] * 4
    while min(done) < length:
        seeds = random.sample([seed for seed in range(4) if done[seed] < length], k=1)
        seeds += [seed for seed in range(4) if seed not in seeds and done[seed] < length and random.random() < 0.6]
        stops = [min(length, done[seed] + random.choice((1, 1, 3, 40, 130))) for seed in seeds]
        parts = [(sequences[seed], done[seed], stop) for seed, stop in zip(seeds, stops, strict=True)]
        for seed, stop, result in zip(seeds, stops, run_step(pool, parts), strict=True):
            assert torch.equal(result, expected[seed][done[seed] : stop])
            done[seed] = stop


@each("group_size", [1, 2, 17, 32])
def test_decodes_are_cut_as_any_tokens(group_size: int) -> None:
    """Where each request has one token there is a shorter way to the same row blocks."""
    pool = Pool("tiled", Shape())
    ends = [40, 7, 40, 96, 1]
    batch = make_batch(16, [(pool.sequence(end, seed=end), end - 1, end) for end in ends])
    every_token = torch.arange(len(ends)).numpy()
    assert (
        cut_into_row_blocks(batch, group_size).tolist() == cut_into_row_blocks(batch, group_size, every_token).tolist()
    )
