"""Every launcher of the layers' kernels, called once for each variant that a model may ask for."""

from dataclasses import replace
from itertools import accumulate
from typing import get_args

import torch

from octavo.attention.base import AttentionLayer, HeadNorms
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.attention.triton_paged import TritonAttention
from octavo.config.layers import RoutingSpec
from octavo.kernels.triton.experts import route
from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.triton.row_ops import activate, add_rms_norm
from octavo.kernels.types import SILU, Activation, ActivationKind, Fused, Routing

FIRST_WITH_E4M3 = 89
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((16, 8, 128), (9, 3, 80), (71, 1, 64), (8, 1, 256))  # H, G, E


def launch_all(capability: int) -> None:
    for dtype in DTYPES:
        _launch_small(dtype)
    for dtype in (torch.bfloat16, torch.float32):
        _launch_experts(dtype)
    for shape in SHAPES:
        _launch_attention(shape, torch.bfloat16, torch.bfloat16)
    _launch_attention((14, 2, 64), torch.float32, torch.float32)
    if capability >= FIRST_WITH_E4M3:
        _launch_attention((16, 8, 128), torch.bfloat16, torch.float8_e4m3fn)


def _launch_small(dtype: torch.dtype) -> None:
    for size in (100, 1024, 4096):
        x, weight = torch.zeros(2, size, dtype=dtype), torch.zeros(size, dtype=dtype)
        add_rms_norm(x, Fused(residual=None, norm_weight=weight, eps=1e-6))
        add_rms_norm(x, Fused(residual=x, norm_weight=weight, eps=1e-6))
        for kind in get_args(ActivationKind):
            activate(x, Activation(kind))


def _launch_attention(shape: tuple[int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """A step of prompts and decodes, and one of decodes only, in layers that each have what others lack."""
    num_heads, num_kv_heads, head_dim = shape
    pool = torch.zeros(64, num_kv_heads, head_dim).to(kv_dtype)
    norm = torch.zeros(head_dim)
    plain = AttentionLayer(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=None)
    normed = replace(plain, norms=HeadNorms(query=norm, key=norm, eps=1e-6))
    layers = [
        normed,
        replace(plain, sliding_window=100),
        replace(normed, rotary=1, soft_cap=50.0),
        replace(plain, rotary=None, sinks=torch.zeros(num_heads)),
    ]
    backend = TritonAttention(dtype, kv_dtype)
    for layer in layers:
        for batch in (_batch([1, 1]), _batch([1, 300])):
            num_tokens = len(batch.positions)
            qkv = torch.zeros(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
            rotary = tuple((torch.zeros(num_tokens, size),) * 2 for size in (head_dim // 2, head_dim // 4))
            step = AttentionMetadata(batch=batch, plans=(backend.plan(batch),), rotary=rotary)
            backend.forward(qkv, LayerKVCache(key=pool, value=pool), step, layer)


def _batch(lengths: list[int]) -> ForwardBatch:
    starts = [0, *accumulate(lengths)]
    nothing = torch.zeros(sum(lengths), dtype=torch.int64)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slot_mapping=nothing,
        block_table=torch.zeros(len(lengths), 32, dtype=torch.int32),
        logits_indices=nothing[:0],
        block_size=16,
        query_start_loc_list=starts,
        seq_lens_list=lengths,
    )


def _launch_experts(dtype: torch.dtype) -> None:
    """Experts alike, and some with biases and with a larger one that is shared."""
    kernels, x = TritonKernels(), torch.zeros(3, 128, dtype=dtype)
    for sizes, has_shared in (([64] * 128, False), ([37, 37, 101], True)):
        routing = Routing(num_experts=len(sizes) - has_shared, top_k=2, renormalizes=has_shared, has_shared=has_shared)
        biases = [torch.zeros(size, dtype=dtype) if has_shared else None for size in (202, 128)]
        experts = kernels.pack_experts(
            [kernels.pack_linear(torch.zeros(2 * size, 128, dtype=dtype), biases[0], "gated") for size in sizes],
            [kernels.pack_linear(torch.zeros(128, size, dtype=dtype), biases[1]) for size in sizes],
        )
        route(torch.zeros(3, len(sizes)), routing)
        rule = RoutingSpec(scores="sigmoid", num_groups=8, top_groups=4, group_best=2, has_correction=True, scale=2.5)
        if len(sizes) % rule.num_groups == 0:
            route(torch.zeros(3, len(sizes)), replace(routing, rule=rule, correction=torch.zeros(len(sizes))))
        ids = torch.zeros(3, dtype=torch.int64)
        rows = kernels.expert_rows(x, ids, ids, experts, SILU)
        kernels.combine_experts(rows.view(1, 3, 128), torch.zeros(1, 3))
