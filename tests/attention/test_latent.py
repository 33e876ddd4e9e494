"""Attention over one vector per token: every backend gives what its definition says, with bits of its own for each row.

Legend: T = tokens of the step, H = query heads, E = size of a vector, V = of its front, which is the value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from tests.attention.steps import NATIVE_DTYPES, Sequence, make_backend, make_batch
from tests.breadth import each, pick

from octavo.attention.base import AttentionBackend, AttentionLayer, LatentKV
from octavo.attention.metadata import AttentionMetadata, LayerKVCache

EPS, LONGEST = 1e-5, 700
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
INVARIANT = [("tiled", torch.float32), *NATIVE_DTYPES]
EVERY = [*INVARIANT, ("tiled", torch.bfloat16), ("sdpa", torch.float32)]


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_heads: int = 3
    rank: int = 20
    rotary_size: int = 6
    block_size: int = 8
    rotates_pairs: bool = True

    @property
    def size(self) -> int:
        return self.rank + self.rotary_size


ODD = Shape()
WHOLE_PARTS = Shape(num_heads=20, rank=64, rotary_size=32, block_size=16, rotates_pairs=False)
AS_PUBLISHED = Shape(num_heads=17, rank=512, rotary_size=64, block_size=32)


class Step:
    """A backend with a layer's pool, and requests of which each is the same numbers for the same seed."""

    def __init__(
        self, name: str, dtype: torch.dtype, shape: Shape, *, rubbish: float = 1e4, num_threads: int = 2
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.backend: AttentionBackend[Any] = make_backend(name, dtype, num_threads=num_threads)
        vectors = torch.full((40 * 128, 1, shape.size), rubbish, dtype=dtype)
        self.cache = LayerKVCache(vectors, vectors[..., : shape.rank])
        self._free = torch.randperm(
            len(vectors) // shape.block_size, generator=torch.Generator().manual_seed(3)
        ).tolist()
        generator = torch.Generator().manual_seed(4)
        self.norm = torch.rand(shape.rank, generator=generator) + 0.5
        self.angles = torch.rand(LONGEST, shape.rotary_size // 2, generator=generator) * 6
        self.layer = AttentionLayer(
            num_heads=shape.num_heads,
            num_kv_heads=1,
            head_dim=shape.size,
            sliding_window=None,
            latent=LatentKV(value_size=shape.rank, norm=self.norm, eps=EPS),
            rotary=0,
            rotates_pairs=shape.rotates_pairs,
            scale=shape.size**-0.5,
        )

    def request(self, length: int, seed: int) -> Sequence:
        """Return queries, vectors as keys, and blocks; values are not used."""
        shape, generator = self.shape, torch.Generator().manual_seed(seed)
        query = torch.randn(LONGEST, shape.num_heads, shape.size, generator=generator)[:length].to(self.dtype)
        key = torch.randn(LONGEST, 1, shape.size, generator=generator)[:length].to(self.dtype)
        blocks = [self._free.pop() for _ in range(-(-length // shape.block_size))]
        return Sequence(query=query, key=key, value=key, block_ids=blocks)

    def run(self, parts: list[tuple[Sequence, int, int]]) -> list[torch.Tensor]:
        """Compute positions start ... stop - 1 of each (request, start, stop); return each one's [., H, V]."""
        batch = make_batch(self.shape.block_size, parts)
        angles = self.angles[batch.positions]
        query = torch.cat([request.query[start:stop] for request, start, stop in parts]).flatten(1)
        vectors = torch.cat([request.key[start:stop] for request, start, stop in parts]).flatten(1)
        rotary = ((angles.cos(), angles.sin()),)
        step = AttentionMetadata(batch=batch, plans=(self.backend.plan(batch),), rotary=rotary)
        out = self.backend.forward_latent(query, vectors, self.cache, step, self.layer)
        assert out.dtype == self.dtype
        results = out.view(len(query), self.shape.num_heads, self.shape.rank)
        return list(torch.split(results, [stop - start for _, start, stop in parts]))

    def expected(self, request: Sequence) -> torch.Tensor:
        """Return [., H, V] in float64, from the definition."""
        rank, length = self.shape.rank, len(request.query)
        front = request.key[:, :, :rank].double()
        front = front / (front.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm.double()
        key = torch.cat((front, self._turned(request.key[:, :, rank:])), dim=-1)[:, 0]  # [C, E]
        query = torch.cat((request.query[:, :, :rank].double(), self._turned(request.query[:, :, rank:])), dim=-1)
        scores = torch.einsum("qhe,ke->hqk", query, key) * self.layer.softmax_scale
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        return torch.einsum("hqk,kv->qhv", scores.masked_fill(hidden, -torch.inf).softmax(-1), front[:, 0])

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply pairs [., ., R] as complex numbers."""
        is_paired, shape = self.shape.rotates_pairs, x.shape[:-1]
        pairs = x.double().view(*shape, -1, 2) if is_paired else x.double().view(*shape, 2, -1).transpose(-1, -2)
        angles = self.angles[: len(x)].double()
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
        parts = torch.view_as_real(turned)
        return (parts if is_paired else parts.transpose(-1, -2)).flatten(-2)


def chunks(length: int) -> Iterator[tuple[int, int]]:
    """Cut at odd places, at last into single tokens."""
    random, start = Random(length), 0
    while start < length:
        stop = min(length, start + (random.choice((1, 3, 31, 64)) if start < length - 5 else 1))
        yield start, stop
        start = stop


@each("shape", [ODD, WHOLE_PARTS, AS_PUBLISHED])
@pytest.mark.parametrize(("name", "dtype"), EVERY, ids=str)
def test_it_is_what_its_definition_says(name: str, dtype: torch.dtype, shape: Shape) -> None:
    step = Step(name, dtype, shape)
    requests = [step.request(length, seed=length) for length in (1, 37, 65, 130)]
    step.run([(requests[2], 0, 40), (requests[3], 0, 129)])
    parts = [(request, start, len(request.query)) for request, start in zip(requests, (0, 0, 40, 129), strict=True)]
    for result, (request, start, _) in zip(step.run(parts), parts, strict=True):
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(result.double(), step.expected(request)[start:], atol=tolerance, rtol=tolerance)


@each("shape", [ODD, WHOLE_PARTS, *pick([], [AS_PUBLISHED])])
@pytest.mark.parametrize(("name", "dtype"), INVARIANT, ids=str)
def test_a_request_has_its_bits_in_any_company_and_chunks(name: str, dtype: torch.dtype, shape: Shape) -> None:
    [alone] = (step := Step(name, dtype, shape)).run([(step.request(150, seed=1), 0, 150)])
    step = Step(name, dtype, shape, rubbish=float("nan"))
    request, other = step.request(150, seed=1), step.request(200, seed=2)
    results = []
    for start, stop in chunks(150):
        among = [(other, 0, 1 + stop), (request, start, stop)] if stop % 2 else [(request, start, stop)]
        results.append(step.run(among)[-1])
    assert torch.equal(torch.cat(results), alone)


@each("num_heads", [3, 20])
@pytest.mark.parametrize(("name", "dtype"), NATIVE_DTYPES, ids=str)
def test_threads_that_share_a_context_do_not_show(name: str, dtype: torch.dtype, num_heads: int) -> None:
    shape = Shape(num_heads=num_heads, rank=32, rotary_size=32, block_size=16)
    results = []
    for num_threads in (1, 2, 7):
        step = Step(name, dtype, shape, num_threads=num_threads)
        request, other = step.request(LONGEST, seed=1), step.request(60, seed=2)
        step.run([(request, 0, LONGEST - 2), (other, 0, 50)])
        results.append(torch.cat(step.run([(other, 50, 51), (request, LONGEST - 2, LONGEST - 1)])))
    assert all(torch.equal(result, results[0]) for result in results[1:])
