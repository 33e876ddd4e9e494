"""Attention as it is defined, and the same bits however tokens are divided among programs.

Legend: T = tokens of the step, H = query heads, G = kv heads, E = head size, C = context positions.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tests.attention.steps import Sequence, Shape, exact_attention, make_batch
from tests.breadth import each, pick
from tests.kernels.triton.device import DEVICE

from octavo.attention.base import AttentionLayer, HeadNorms, LatentKV, split_heads
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.attention.triton_paged import SPLIT_SIZE, TritonAttention, assign_programs
from octavo.errors import UnsupportedModelError
from octavo.kernels.reference import Kernels

# Means of values of size 1: bfloat16 rounds weights and result to 1 in 256; of e4m3, keys and values to 1 in 16.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 0.12}
SHAPES = [
    Shape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, num_blocks=48),
    Shape(num_heads=3, num_kv_heads=1, head_dim=20, block_size=8, num_blocks=96),
    Shape(num_heads=70, num_kv_heads=1, head_dim=12, block_size=48, num_blocks=16),  # more heads than a tile has rows
]
Part = tuple[Sequence, int, int]  # its positions start ... stop - 1 are computed


class Memory:
    """KV memory, NaN until written, and sequences in it."""

    def __init__(self, shape: Shape, kv_dtype: torch.dtype | None = None) -> None:
        self.shape = shape
        size = shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim
        self.key, self.value = (torch.full(size, torch.nan).to(DEVICE, kv_dtype or shape.dtype) for _ in range(2))
        self._free = torch.randperm(shape.num_blocks, generator=torch.Generator().manual_seed(9)).tolist()

    def sequence(self, length: int, seed: int) -> Sequence:
        """Return a request of `length` positions, with its keys and values in memory."""
        shape, generator = self.shape, torch.Generator().manual_seed(seed)

        def random(num_heads: int) -> torch.Tensor:
            return torch.randn(length, num_heads, shape.head_dim, generator=generator).to(DEVICE, shape.dtype)

        blocks = [self._free.pop() for _ in range(-(-length // shape.block_size))]
        made = Sequence(
            query=random(shape.num_heads), key=random(shape.num_kv_heads), value=random(shape.num_kv_heads),
            block_ids=blocks,
        )  # fmt: skip
        for position in range(length):
            block, offset = blocks[position // shape.block_size], position % shape.block_size
            self.key[block, :, offset] = made.key[position].to(self.key.dtype)
            self.value[block, :, offset] = made.value[position].to(self.value.dtype)
        return made

    def attend(self, parts: list[Part], *, window: int | None = None) -> list[torch.Tensor]:
        """Compute each part's queries in one step; return each one's [., H, E]."""
        batch = on_device(make_batch(self.shape.block_size, parts))
        query = torch.cat([sequence.query[start:stop] for sequence, start, stop in parts])
        out = attend_batch(self, batch, query, window=window)
        return list(torch.split(out, [stop - start for _, start, stop in parts]))


def on_device(batch: ForwardBatch) -> ForwardBatch:
    tensors = ("positions", "query_start_loc", "seq_lens", "slot_mapping", "block_table")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in tensors})


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}")
def shape(request: pytest.FixtureRequest) -> Shape:
    shape: Shape = request.param
    return shape


def assert_exact(result: torch.Tensor, expected: torch.Tensor, kv_dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[kv_dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@each(("window", "dtype"), pick([(40, torch.bfloat16)], list(product([None, 40], [torch.float32, torch.bfloat16]))))
def test_a_step_of_prompts_chunks_and_decodes(shape: Shape, dtype: torch.dtype, window: int | None) -> None:
    memory = Memory(replace(shape, dtype=dtype))
    prompt, chunk, decode = (memory.sequence(length, seed=length) for length in (37, SPLIT_SIZE + 30, SPLIT_SIZE + 1))
    parts: list[Part] = [
        (prompt, 0, 37),
        (chunk, SPLIT_SIZE + 20, SPLIT_SIZE + 30),
        (decode, SPLIT_SIZE, SPLIT_SIZE + 1),
    ]
    for result, (sequence, start, stop) in zip(memory.attend(parts, window=window), parts, strict=True):
        assert_exact(result, exact_attention(sequence, window)[start:stop], dtype)


def test_keys_and_values_in_8_bits() -> None:
    memory = Memory(replace(SHAPES[0], dtype=torch.bfloat16), torch.float8_e4m3fn)
    prompt, decode = memory.sequence(70, seed=1), memory.sequence(90, seed=2)
    for result, (sequence, start, stop) in zip(
        memory.attend(parts := [(prompt, 0, 70), (decode, 89, 90)]), parts, strict=True
    ):
        rounded = replace(sequence, key=e4m3(sequence.key), value=e4m3(sequence.value))
        assert_exact(result, exact_attention(rounded)[start:stop], torch.bfloat16)
        assert_exact(result, exact_attention(sequence)[start:stop], torch.float8_e4m3fn)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


@each(
    ("window", "dtype"),
    pick([(100, torch.bfloat16)], list(product([None, 100], [torch.float32, torch.bfloat16]))),
)
def test_a_token_has_the_same_bits_by_either_way(dtype: torch.dtype, window: int | None) -> None:
    """In a chunk of many rows, in one of few, and as a decode, over several splits."""
    shape, length = replace(SHAPES[0], dtype=dtype), SPLIT_SIZE + 70
    memory = Memory(shape)
    sequence, other = memory.sequence(length, seed=1), memory.sequence(40, seed=2)
    [whole] = memory.attend([(sequence, length - 45, length)], window=window)
    spans = ((length - 1, length), (length - 20, length - 4), (length - 45, length - 44))
    for start, stop in spans[: pick(2, 3)]:
        [alone] = memory.attend([(sequence, start, stop)], window=window)
        _, alongside = memory.attend([(other, 0, 40), (sequence, start, stop)], window=window)
        expected = whole[start - length + 45 : stop - length + 45]
        assert torch.equal(alone, expected)
        assert torch.equal(alongside, expected)


def test_decodes_do_not_show_in_one_another(shape: Shape) -> None:
    """Nor how many splits the longest of them needs."""
    memory = Memory(shape)
    short, long = memory.sequence(21, seed=1), memory.sequence(2 * SPLIT_SIZE + 1, seed=2)
    [alone] = memory.attend([(short, 20, 21)])
    alongside, _ = memory.attend([(short, 20, 21), (long, 2 * SPLIT_SIZE, 2 * SPLIT_SIZE + 1)])
    assert torch.equal(alone, alongside)


def test_a_request_without_context_gets_zeros_and_reads_nothing() -> None:
    """As rows that fill up a batch for a captured graph."""
    memory = Memory(SHAPES[0])
    sequence = memory.sequence(20, seed=1)
    [expected] = memory.attend([(sequence, 19, 20)])
    empty = replace(sequence, query=sequence.query[:1] * torch.nan)
    batch = make_batch(16, [(sequence, 19, 20), (empty, 0, 1)])
    batch.seq_lens[1] = 0
    out = attend_batch(memory, batch, torch.cat((sequence.query[19:20], empty.query)))
    assert torch.equal(out[:1], expected)
    assert torch.equal(out[1:], torch.zeros_like(expected))


def attend_batch(
    memory: Memory, batch: ForwardBatch, query: torch.Tensor, *, window: int | None = None
) -> torch.Tensor:
    shape, batch = memory.shape, on_device(batch)
    layer = AttentionLayer(
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, sliding_window=window
    )
    backend = TritonAttention(shape.dtype, memory.key.dtype)
    key, value = (pool.view(-1, *pool.shape[1::2]) for pool in (memory.key, memory.value))
    step = AttentionMetadata(batch=batch, plans=(backend.plan(batch),), rotary=())
    return backend.attend(query, LayerKVCache(key=key, value=value), step, layer).view(query.shape)


def write(
    qkv: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    kv_cache: LayerKVCache,
    layer: AttentionLayer,
    block_size: int,
) -> torch.Tensor:
    """Return the queries of tokens in blocks of some size, once keys and values are written."""
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    batch = ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        query_start_loc=nothing,
        seq_lens=nothing,
        slot_mapping=slots,
        block_table=nothing,
        logits_indices=nothing,
        block_size=block_size,
        query_start_loc_list=[],
        seq_lens_list=[],
    )
    step = AttentionMetadata(batch=batch, plans=(), rotary=(rotary,))
    return TritonAttention(qkv.dtype, kv_cache.key.dtype).write_kv(qkv, kv_cache, step, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "has_norms"), [(4, 2, 16, True), (3, 1, 20, False)])
def test_heads_are_those_of_separate_ops(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool
) -> None:
    generator, num_tokens, block_size = torch.Generator().manual_seed(1), 5, 4
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(DEVICE, dtype)
    angles = torch.randn(num_tokens, head_dim // 2, generator=generator).to(DEVICE)
    weights = torch.rand(2, head_dim, generator=generator).to(DEVICE) + 0.5
    slots = torch.tensor([7, 0, -1, 11, 4], device=DEVICE)
    key_pool = torch.full((12, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    value_pool = key_pool.clone()
    rotary = angles.cos(), angles.sin()
    layer = AttentionLayer(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_window=None,
        norms=HeadNorms(query=weights[0], key=weights[1], eps=1e-6) if has_norms else None,
    )
    query = write(qkv, rotary, slots, LayerKVCache(key=key_pool, value=value_pool), layer, block_size)
    expected = split_heads(qkv, (rotary,), layer, Kernels())
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(query, expected[0], atol=tolerance, rtol=tolerance)
    for pool, written in zip((key_pool, value_pool), expected[1:], strict=True):
        by_block = pool.view(-1, num_kv_heads, block_size, head_dim)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                stored = by_block[slot // block_size, :, slot % block_size]
                torch.testing.assert_close(stored, written[token], atol=tolerance, rtol=tolerance)
        assert pool.isnan().sum() == (12 - 4) * num_kv_heads * head_dim  # a slot below 0 is nowhere


def test_8_bits_saturate_and_keep_what_is_no_number() -> None:
    qkv = torch.tensor([[1.0, 1.0, 500.0, 1e9, -1e9, torch.nan]], device=DEVICE)  # one head of 2 elements each
    key, value = (torch.zeros(1, 1, 2, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2))
    angles, slots = torch.zeros(1, 1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    layer = AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=2, sliding_window=None)
    write(qkv, (angles + 1, angles), slots, LayerKVCache(key=key, value=value), layer, 1)
    assert key.float().flatten().tolist() == [448.0, 448.0]
    assert value.float().flatten()[0] == -448.0
    assert value.float().flatten()[1].isnan()


def test_latent_vectors_are_refused() -> None:
    latent = LatentKV(value_size=8, norm=torch.ones(8), eps=1e-6)
    layer = AttentionLayer(num_heads=2, num_kv_heads=1, head_dim=12, sliding_window=None, latent=latent)
    with pytest.raises(UnsupportedModelError, match="attention_backend=triton-deterministic does not compute latent"):
        TritonAttention(torch.float32).check(layer)


@pytest.mark.parametrize("group_size", [1, 5, 100])
def test_every_row_is_in_one_program(group_size: int) -> None:
    nothing = torch.zeros(0)
    sequence = Sequence(query=nothing, key=nothing, value=nothing, block_ids=list(range(40)))
    parts: list[Part] = [(sequence, start, stop) for start, stop in ((0, 200), (30, 31), (5, 9), (0, 1), (7, 500))]
    batch = make_batch(16, parts)
    work = assign_programs(batch, group_size, 64)
    assert work.few is not None
    assert work.few.items is not None
    assert work.few.tokens is not None
    sized = [(work.few.items, work.few.rows), (work.many, 64)]
    rows = [
        (request, first + at)
        for items, size in sized
        if items is not None
        for request, first, _ in items.tolist()
        for at in range(size)
    ]
    assert len(rows) == len(set(rows))
    for request, (_, start, stop) in enumerate(parts):
        assert {(request, row) for row in range((stop - start) * group_size)} <= set(rows)
    starts = batch.query_start_loc_list
    assert all(starts[request] <= token < starts[request + 1] for token, request in work.few.tokens.tolist())
