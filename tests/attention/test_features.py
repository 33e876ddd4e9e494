"""Optional features of attention layers: soft caps, sinks, partial or no rotation.

Legend: H = query heads, G = kv heads, D = head size, C = context positions, A = rotated pairs of elements.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.attention.steps import NATIVE, NATIVE_DTYPES, Pool, Sequence, Shape, make_backend, run_step
from tests.breadth import RUNS_ALL, each, pick
from tests.worker.fixed_attention import FixedAttention

from octavo.attention.base import AttentionLayer, HeadNorms
from octavo.errors import UnsupportedModelError
from octavo.kernels.reference import Kernels

LENGTH = 301  # two spans of the C++ kernels, and two of Triton's
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True, kw_only=True)
class Features:
    """Arguments of `run_step` in addition to a plain layer's; `num_pairs` of 0: nothing is rotated."""

    name: str
    num_pairs: int
    soft_cap: float | None = None
    has_sinks: bool = False
    scale: float | None = None
    sliding_window: int | None = None
    has_norms: bool = False
    normalizes_values: bool = False
    projects: str = "qkv"
    spans: tuple[tuple[int, int], ...] = ()  # [start, end), whose tokens see one another
    norms_behind: bool = False
    rotates_pairs: bool = False
    grows: bool = False  # queries, with their position
    chunk_size: int | None = None

    def visible_ends(self) -> torch.Tensor | None:
        ends = torch.arange(LENGTH) + 1
        for start, end in self.spans:
            ends[start:end] = end
        return ends if self.spans else None

    def sinks(self, num_heads: int) -> torch.Tensor | None:
        return torch.linspace(-3.0, 4.0, num_heads) if self.has_sinks else None

    def norms(self, head_dim: int) -> HeadNorms | None:
        query, key = torch.rand(2, head_dim, generator=torch.Generator().manual_seed(1)) + 0.5
        return HeadNorms(query=query, key=key, eps=1e-6) if self.has_norms else None

    def table(self) -> torch.Tensor:
        """Return the angles of positions, [C, A]."""
        return torch.outer(torch.arange(LENGTH), 50.0 ** -torch.linspace(0, 1, self.num_pairs))

    def arguments(self, shape: Shape) -> dict[str, Any]:
        return {
            "sliding_window": self.sliding_window,
            "scale": self.scale,
            "norms": self.norms(shape.head_dim),
            "table": self.table() if self.num_pairs else None,
            "rotates": self.num_pairs > 0,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks(shape.num_heads),
            "normalizes_values": self.normalizes_values,
            "projects": self.projects,
            "visible_ends": self.visible_ends(),
            "norms_behind": self.norms_behind,
            "rotates_pairs": self.rotates_pairs,
            "query_growth": self.growth() if self.grows else None,
            "chunk_size": self.chunk_size,
        }

    def growth(self) -> torch.Tensor:
        """Return the factors of rotated elements of queries by position, [C]."""
        return 1.0 + torch.arange(LENGTH) / 1000


ALL = Features(
    name="all", num_pairs=9, soft_cap=3.0, has_sinks=True, scale=0.15, sliding_window=70, has_norms=True
)  # also more than one vector of 16 pairs, see SHAPES
SPANS = ((5, 30), (34, 39), (39, 300 - 41))  # of no tile, next to one another, and longer than several tiles
FEATURES = [
    Features(name="soft cap", num_pairs=20, soft_cap=2.0),
    Features(name="large scores under a cap", num_pairs=20, soft_cap=30.0, scale=40.0),
    Features(name="sinks", num_pairs=20, has_sinks=True),
    Features(name="sinks and window", num_pairs=20, has_sinks=True, sliding_window=33),
    Features(name="partial rotary", num_pairs=5),
    Features(name="partial rotary, norms", num_pairs=17, has_norms=True),
    Features(name="pairs", num_pairs=9, has_norms=True, rotates_pairs=True, chunk_size=64),
    Features(name="growing queries", num_pairs=20, grows=True, chunk_size=37),
    Features(name="norms behind", num_pairs=9, has_norms=True, norms_behind=True),
    Features(name="no rotary", num_pairs=0),
    Features(name="no rotary, norms", num_pairs=0, has_norms=True),
    Features(name="norms of values", num_pairs=20, has_norms=True, normalizes_values=True),
    Features(name="keys as values", num_pairs=17, has_norms=True, normalizes_values=True, projects="qk"),
    Features(name="spans", num_pairs=20, spans=SPANS),
    Features(name="spans and window", num_pairs=20, spans=SPANS, sliding_window=33, has_sinks=True),
    ALL,
]
SHORT_SPANS = replace(FEATURES[-2], spans=SPANS[:2])
SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=40, block_size=32)
SHAPES = [SHAPE, replace(SHAPE, block_size=48), replace(SHAPE, head_dim=128), replace(SHAPE, num_heads=40)]
BACKENDS = [("tiled", torch.float32), ("sdpa", torch.float32), *pick([], [("sdpa", torch.bfloat16)])]
BACKENDS += NATIVE_DTYPES
BACKENDS += [(f"{name}+int8", torch.bfloat16) for name in NATIVE]


@pytest.fixture(params=BACKENDS, ids=lambda param: f"{param[0]}-{param[1]}".replace("torch.", ""))
def backend(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """A backend's name, and a dtype."""
    name, dtype = request.param
    return name, dtype


def turned(x: torch.Tensor, norm: torch.Tensor | None, features: Features, *, grows: bool = False) -> torch.Tensor:
    """Normalize and rotate x [C, heads, D] in float64."""

    def normed(wide: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return wide
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.double()

    wide = x.double() if features.norms_behind else normed(x.double())
    table, num_pairs = features.table()[: len(x)].double().unsqueeze(1), features.num_pairs  # [C, 1, A]
    if features.rotates_pairs:
        wide = torch.cat(
            (wide[..., : 2 * num_pairs : 2], wide[..., 1 : 2 * num_pairs : 2], wide[..., 2 * num_pairs :]), -1
        )
    first, second, rest = wide.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    factor = features.growth()[: len(x)].view(-1, 1, 1).double() if grows else 1.0
    cos, sin = table.cos() * factor, table.sin() * factor
    both = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return normed(both) if features.norms_behind else both


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def definition(sequence: Sequence, features: Features, *, as_int8: bool = False) -> torch.Tensor:
    """Return attention at every position, [C, H, D] in float64, from the formulas of its sources."""
    num_heads, head_dim = sequence.query.shape[1:]
    norms = features.norms(head_dim)
    query = turned(sequence.query, norms.query if norms else None, features, grows=features.grows)
    key = turned(sequence.key, norms.key if norms else None, features)
    value = (sequence.value if features.projects == "qkv" else sequence.key).double()
    if features.normalizes_values:
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6)
    if as_int8:
        key, value = rounded_to_int8(key), rounded_to_int8(value)
    key, value = (kv.repeat_interleave(num_heads // kv.shape[1], dim=1) for kv in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (features.scale or head_dim**-0.5)
    if features.soft_cap is not None:
        scores = features.soft_cap * torch.tanh(scores / features.soft_cap)
    behind = torch.arange(len(query)).unsqueeze(1) - torch.arange(len(query))  # [C, C]
    ends = features.visible_ends()
    is_later = behind < 0 if ends is None else torch.arange(len(query)) >= ends[: len(query)].unsqueeze(1)
    if features.chunk_size is not None:  # all of a chunk see nothing before it
        starts = torch.arange(len(query)) // features.chunk_size * features.chunk_size
        is_later = is_later | (torch.arange(len(query)) < starts.unsqueeze(1))
    scores = scores.masked_fill(is_later | (behind >= (features.sliding_window or LENGTH)), -torch.inf)
    most, sinks = scores.amax(-1, keepdim=True), features.sinks(num_heads)
    powers = (scores - most).exp()
    total = powers.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double().view(-1, 1, 1) - most).exp()
    return torch.einsum("hqk,khd->qhd", powers / total, value)


def in_chunks(pool: Pool, sequence: Sequence, stops: list[int], features: Features) -> torch.Tensor:
    arguments = features.arguments(pool.shape)
    results = [run_step(pool, [(sequence, start, stop)], **arguments)[0] for start, stop in pairwise(stops)]
    return torch.cat(results)


@each(("features", "shape"), [(features, SHAPE) for features in FEATURES] + [(ALL, shape) for shape in SHAPES[1:]])
def test_as_defined_and_the_same_bits_in_chunks(
    backend: tuple[str, torch.dtype], features: Features, shape: Shape
) -> None:
    """By default torch's tiles, which are slow, take a third of the length: more than two tiles of theirs.

    They know no vectors, which the other shapes are about.
    """
    name, dtype = backend
    if name == "tiled" and shape is not SHAPE and not RUNS_ALL:
        return
    length = pick(160, LENGTH) if name == "tiled" else LENGTH
    spans = tuple((start, min(end, length - 42)) for start, end in features.spans)
    check(Pool(name, replace(shape, dtype=dtype), rubbish=float("nan")), length, replace(features, spans=spans))


KEYS_AS_VALUES = FEATURES[-4]


WITHOUT_CHUNKS = [replace(features, chunk_size=None) for features in FEATURES[:-3]]  # which Triton's kernels lack


@each("features", pick([KEYS_AS_VALUES, ALL], [*WITHOUT_CHUNKS, SHORT_SPANS, ALL]))
def test_triton(features: Features) -> None:
    interpreter = pytest.importorskip("octavo.kernels.triton.interpreter")
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("Triton compiles for a GPU here; tests/kernels/triton has its tests")
    interpreter.repair()
    check(Pool("triton", replace(SHAPE, num_heads=2, num_kv_heads=1), rubbish=float("nan")), 80, features)


@lru_cache(maxsize=64)
def defined(shape: Shape, length: int, features: Features, as_int8: bool) -> torch.Tensor:
    """Return the definition for a sequence of `check`: backends of a dtype share it."""
    return definition(Pool("sdpa", shape).sequence(length, seed=1), features, as_int8=as_int8)


def check(pool: Pool, length: int, features: Features) -> None:
    """A prompt in one step is as defined; so it is in chunks, whose last tokens are decoded among strangers."""
    sequence, stranger = pool.sequence(length, seed=1), pool.sequence(length - 8, seed=2)
    whole, dtype = in_chunks(pool, sequence, [0, length], features), pool.shape.dtype
    as_int8 = pool.kv_cache.key.dtype == torch.int8
    tolerance = 4e-2 if as_int8 else TOLERANCES[dtype]  # a rounded key may be the next number
    expected = defined(replace(pool.shape, block_size=SHAPE.block_size), length, features, as_int8)
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    if not pool.backend.is_batch_invariant:
        return
    chunks = in_chunks(pool, sequence, [0, 33, length - 40, length - 2], features)
    in_chunks(pool, stranger, [0, length - 40], features)
    parts = [(stranger, length - 40, length - 8), (sequence, length - 2, length)]
    last = run_step(pool, parts, **features.arguments(pool.shape))[1]
    decoded = in_chunks(pool, sequence, [length - 2, length - 1, length], features)
    assert torch.equal(torch.cat((chunks, last)), whole)
    assert torch.equal(decoded, last)


@each("features", FEATURES)
def test_the_tolerance_notices_what_is_left_out(features: Features) -> None:
    sequence = Pool("tiled", SHAPE).sequence(LENGTH, seed=1)
    full = Features(name="plain", num_pairs=20)
    mutants = [replace(features, num_pairs=full.num_pairs), replace(features, soft_cap=None)]
    mutants += [replace(features, has_sinks=False), replace(features, has_norms=False)]
    expected = definition(sequence, features)
    for mutant in mutants:
        assert mutant == features or (definition(sequence, mutant) - expected).abs().max() > 0.05


@pytest.mark.parametrize("name", NATIVE)
@each("block_size", pick([32], [32, 48]))
def test_threads_that_share_a_context_do_not_show(name: str, block_size: int) -> None:
    """Spans of one long context that several threads compute are joined before the sinks join them."""
    pool = Pool(name, replace(SHAPE, block_size=block_size), num_threads=1)
    sequence = pool.sequence(2000, seed=1)
    arguments = replace(ALL, sliding_window=None).arguments(SHAPE) | {"table": torch.zeros(2000, 9)}
    run_step(pool, [(sequence, 0, 1999)], **arguments)
    [expected] = run_step(pool, [(sequence, 1999, 2000)], **arguments)
    pool.backend = Pool(name, SHAPE, num_threads=4).backend
    assert torch.equal(run_step(pool, [(sequence, 1999, 2000)], **arguments)[0], expected)


def test_a_layer_that_reads_the_keys_and_values_of_another(backend: tuple[str, torch.dtype]) -> None:
    """Its queries alone are projected: what the other has written is what it attends to."""
    name, dtype = backend
    pool = Pool(name, replace(SHAPE, dtype=dtype), rubbish=float("nan"))
    features = Features(name="owner", num_pairs=20, has_norms=True, sliding_window=33)
    owner = pool.sequence(90, seed=1)
    arguments = features.arguments(SHAPE) | {"table": features.table()}
    run_step(pool, [(owner, 0, 90)], **arguments)
    reader = replace(owner, query=owner.query.flip(0))
    [expected] = run_step(pool, [(reader, 0, 90)], **arguments)
    parts = [(reader, 0, 71), (reader, 71, 90)]
    found = torch.cat([run_step(pool, [part], **arguments | {"projects": "q"})[0] for part in parts])
    tolerance = 0 if pool.backend.is_batch_invariant else TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@each("size", [1e-3, 0.3, 1.0, 1e4, 1e30])
def test_a_cap_bounds_any_score(backend: tuple[str, torch.dtype], size: float) -> None:
    """Two positions, whose scores are `size` and its opposite."""
    name, dtype = backend
    pool = Pool(name, Shape(num_heads=1, num_kv_heads=1, head_dim=32, block_size=32, num_blocks=1, dtype=dtype))
    query, key, value = (torch.zeros(2, 1, 32, dtype=dtype) for _ in range(3))
    query[1, 0, 0], key[0, 0, 0], key[1, 0, 0], value[0] = 1.0, -size, size, 1.0
    sequence = Sequence(query=query, key=key, value=value, block_ids=[0])
    [result] = run_step(pool, [(sequence, 0, 2)], scale=1.0, soft_cap=1.5, rotates=False)
    share = 1 / (1 + math.exp(2 * 1.5 * math.tanh(float(key[1, 0, 0]) / 1.5)))
    assert result[1, 0].tolist() == pytest.approx([share] * 32, rel=TOLERANCES[dtype])


def test_a_backend_that_lacks_a_feature_says_so_when_a_model_is_built() -> None:
    backend = FixedAttention(Kernels(), torch.float32)
    layer = AttentionLayer(num_heads=2, num_kv_heads=1, head_dim=8, sliding_window=None, index=7)
    backend.check(layer)
    with pytest.raises(UnsupportedModelError, match="layer 7: attention_backend=fixed does not compute soft_cap"):
        backend.check(replace(layer, soft_cap=50.0))
    with pytest.raises(UnsupportedModelError, match="layer 7: attention_backend=fixed does not compute sinks"):
        backend.check(replace(layer, sinks=torch.zeros(2)))


@pytest.mark.skipif(not NATIVE, reason="the C++ kernels were not built")
def test_tables_that_the_native_backend_takes() -> None:
    backend = make_backend(NATIVE[0], torch.float32)
    layer = AttentionLayer(num_heads=2, num_kv_heads=1, head_dim=8, sliding_window=None, index=7, rotary=3)
    backend.check(layer)
    with pytest.raises(UnsupportedModelError, match=f"layer 7: .*={NATIVE[0]} takes at most 4 rotary tables"):
        backend.check(replace(layer, rotary=4))


def test_a_layer_checks_what_it_is_told() -> None:
    layer = AttentionLayer(num_heads=2, num_kv_heads=1, head_dim=8, sliding_window=None, index=7)
    with pytest.raises(UnsupportedModelError, match=r"layer 7: soft_cap=0.0: must be above 0"):
        replace(layer, soft_cap=0.0)
    with pytest.raises(UnsupportedModelError, match=r"layer 7: sinks=torch.float32 \[3\]: must be float32 \[2\]"):
        replace(layer, sinks=torch.zeros(3))
