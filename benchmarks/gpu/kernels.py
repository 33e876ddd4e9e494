"""Every op of a decoder layer on the device: right, beside the torch ops that define it; fast, beside the roofline.

Weights and KV are taken in turn from copies that are together larger than the caches.

Legend: T = rows, R = requests, C = positions of a context, H = query heads, G = kv heads, E = head size.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.gpu.cases import COLD_BYTES, Case, measure_all
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Report
from benchmarks.gpu.sampling import sampling_cases
from benchmarks.kernels.ops import linear_run
from octavo.attention.base import AttentionBackend, AttentionLayer, HeadNorms
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.attention.selector import select_attention
from octavo.attention.torch_sdpa import SdpaAttention
from octavo.kernels.dispatch import select_kernels
from octavo.kernels.reference import Kernels
from octavo.kernels.types import SILU, Fused

_BLOCK_SIZE = 32


def measure_kernels(plan: Plan, report: Report, limits: Limits) -> None:
    """Compare and time; an op that fails is noted and the next one goes on."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    kernels, attention = select_kernels(device, dtype), select_attention(device, dtype)
    report.add("kernels", kernels.name, note=f"attention: {attention.name}")
    for name, geometry in plan.geometries.items():
        layer = _Layer(geometry, device, dtype, kernels, attention)
        for num_rows in (*plan.batches, plan.max_num_batched_tokens):
            for make in (layer.norms, layer.linears):
                measure_all(make(num_rows), f"{name} T={num_rows}", report, limits, device, dtype)
        for num_rows in plan.batches:
            cases = sampling_cases(num_rows, int(geometry["vocab_size"]), plan.context, device)
            measure_all(cases, f"{name} T={num_rows}", report, limits, device, dtype)
        for num_requests in plan.batches:
            where = f"{name} R={num_requests} C={plan.context}"
            measure_all(layer.decode(num_requests, plan.context), where, report, limits, device, dtype)
        where = f"{name} C={plan.prefill_tokens}"
        measure_all(layer.prefill(plan.prefill_tokens), where, report, limits, device, dtype)


class _Layer:
    """The ops of one layer of a geometry, and its LM head."""

    def __init__(
        self,
        geometry: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
        attention: AttentionBackend[Any],
    ) -> None:
        self._device, self._dtype, self._kernels, self._attention = device, dtype, kernels, attention
        self._reference = Kernels()
        self._linear_kernels = {"": kernels}
        exact = select_kernels(device, dtype, deterministic=True)
        if exact.name != kernels.name:
            self._linear_kernels[", deterministic"] = exact
        self._hidden, self._inner = int(geometry["hidden_size"]), int(geometry["intermediate_size"])
        self._vocab = int(geometry["vocab_size"])
        head_dim = int(geometry["head_dim"])
        query, key = (torch.rand(head_dim, device=device) + 0.5 for _ in range(2))
        self._layer = AttentionLayer(
            num_heads=int(geometry["num_attention_heads"]),
            num_kv_heads=int(geometry["num_key_value_heads"]),
            head_dim=head_dim,
            sliding_window=None,
            norms=HeadNorms(query=query, key=key, eps=1e-6),
        )

    def norms(self, num_rows: int) -> Iterator[Case]:
        """What is bound by its activations."""
        x, residual = self._random(num_rows, self._hidden), self._random(num_rows, self._hidden)
        weight, wide = self._random(self._hidden), self._random(num_rows, 2 * self._inner)
        fused = Fused(residual=residual, norm_weight=weight, eps=1e-6)
        yield Case(
            name="add + norm",
            run=lambda: torch.cat(self._kernels.add_rms_norm(x, fused)),
            define=lambda: torch.cat(self._reference.add_rms_norm(x, fused)),
            num_bytes=6 * x.nbytes,  # two read and two written, and again by the concatenation
        )
        yield Case(
            name="silu * up",
            run=lambda: self._kernels.activate(wide, SILU),
            define=lambda: self._reference.activate(wide, SILU),
            num_bytes=1.5 * wide.nbytes,
        )

    def linears(self, num_rows: int) -> Iterator[Case]:
        """Linear maps, and the largest logit of each row."""
        layer = self._layer
        qkv = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        shapes = {
            "qkv": (qkv, self._hidden),
            "out": (self._hidden, layer.num_heads * layer.head_dim),
            "gate_up": (2 * self._inner, self._hidden),
            "down": (self._hidden, self._inner),
        }
        for name, (num_outputs, in_size) in shapes.items():
            weights = self._copies(num_outputs, in_size)
            packed = [self._kernels.pack_linear(weight, None) for weight in weights]
            plain = self._reference.pack_linear(weights[0], None)
            x = self._random(num_rows, in_size)
            for label, kernels in self._linear_kernels.items():
                yield Case(
                    name=f"linear {name}{label}",
                    run=linear_run(kernels, x, packed),
                    define=partial(self._reference.linear, x, plain),
                    num_bytes=weights[0].nbytes + x.nbytes + num_rows * num_outputs * self._dtype.itemsize,
                    num_operations=2.0 * num_rows * num_outputs * in_size,
                )
        if num_rows <= 256:
            yield self._logits_argmax(num_rows)

    def _logits_argmax(self, num_rows: int) -> Case:
        x, weight = self._random(num_rows, self._hidden), self._random(self._vocab, self._hidden)
        packed = self._kernels.pack_linear(weight, None, "logits")
        plain = self._reference.pack_linear(weight, None, "logits")
        return Case(
            name="largest logit",
            run=lambda: self._kernels.logits_argmax(x, packed)[0],
            define=lambda: self._reference.logits_argmax(x, plain)[0],
            num_bytes=weight.nbytes,
            num_operations=2.0 * num_rows * weight.numel(),
        )

    def decode(self, num_requests: int, context: int) -> Iterator[Case]:
        """Attend with one token of each request to its context, which both backends have written themselves."""
        layer = self._layer
        kv_bytes = 2 * num_requests * context * layer.num_kv_heads * layer.head_dim * self._dtype.itemsize
        num_copies = max(1, min(16, -(-COLD_BYTES // kv_bytes)))
        prompt, token = self._qkv(num_requests * (context - 1)), self._qkv(num_requests)
        fill, step = self._batch(num_requests, 0, context - 1), self._batch(num_requests, context - 1, 1)

        def attend(backend: AttentionBackend[Any], num_pools: int) -> Callable[[], torch.Tensor]:
            pools = [self._pool(backend, num_requests, context) for _ in range(num_pools)]
            for pool in pools:
                self._attend(backend, prompt, pool, fill)
            turns = cycle(pools)
            return lambda: self._attend(backend, token, next(turns), step)

        yield Case(
            name="attention, decode",
            run=attend(self._attention, num_copies),
            define=attend(SdpaAttention(self._reference, self._dtype), 1),
            num_bytes=kv_bytes,
        )

    def prefill(self, num_tokens: int) -> Iterator[Case]:
        """Attend with all tokens of one prompt."""
        layer = self._layer
        qkv, batch = self._qkv(num_tokens), self._batch(1, 0, num_tokens)
        other: AttentionBackend[Any] = SdpaAttention(self._reference, self._dtype)
        pool, others = (self._pool(backend, 1, num_tokens) for backend in (self._attention, other))
        yield Case(
            name="attention, prefill",
            run=lambda: self._attend(self._attention, qkv, pool, batch),
            define=lambda: self._attend(other, qkv, others, batch),
            num_bytes=1.5 * qkv.nbytes,
            num_operations=2.0 * num_tokens**2 * layer.num_heads * layer.head_dim,  # half of the square is masked
        )

    def _attend(
        self, backend: AttentionBackend[Any], qkv: torch.Tensor, pool: LayerKVCache, batch: ForwardBatch
    ) -> torch.Tensor:
        angles = batch.positions[:, None] / 10.0 ** torch.arange(
            self._layer.head_dim // 2, device=self._device
        ).float().div(20.0)
        rotary = ((angles.cos(), angles.sin()),)
        step = AttentionMetadata(batch=batch, plans=(backend.plan(batch),), rotary=rotary)
        return backend.forward(qkv, pool, step, self._layer)  # [T, H * E]

    def _batch(self, num_requests: int, start: int, num_tokens: int) -> ForwardBatch:
        """Return a step in which each request computes `num_tokens` from position `start` on. Blocks are in a row."""
        blocks_each = -(-(start + num_tokens + 1) // _BLOCK_SIZE)
        table = torch.arange(num_requests * blocks_each).view(num_requests, -1)
        positions = torch.arange(start, start + num_tokens).repeat(num_requests)
        slots = (torch.arange(num_requests) * blocks_each * _BLOCK_SIZE).repeat_interleave(num_tokens) + positions
        starts = [index * num_tokens for index in range(num_requests + 1)]
        lens = [start + num_tokens] * num_requests
        return ForwardBatch(
            input_ids=torch.zeros_like(positions).to(self._device),
            positions=positions.to(self._device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32).to(self._device),
            seq_lens=torch.tensor(lens, dtype=torch.int32).to(self._device),
            slot_mapping=slots.to(self._device),
            block_table=table.to(torch.int32).to(self._device),
            logits_indices=torch.zeros(0, dtype=torch.int64).to(self._device),
            block_size=_BLOCK_SIZE,
            query_start_loc_list=starts,
            seq_lens_list=lens,
        )

    def _pool(self, backend: AttentionBackend[Any], num_requests: int, context: int) -> LayerKVCache:
        layout = backend.kv_layout(self._layer.head_dim)
        num_slots = num_requests * -(-(context + 1) // _BLOCK_SIZE) * _BLOCK_SIZE
        shape = num_slots, self._layer.num_kv_heads, layout.head_size
        key, value = (torch.zeros(shape, dtype=layout.dtype, device=self._device) for _ in range(2))
        return LayerKVCache(key=key, value=value)

    def _qkv(self, num_tokens: int) -> torch.Tensor:
        layer = self._layer
        return self._random(num_tokens, (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim)

    def _copies(self, num_outputs: int, in_size: int) -> list[torch.Tensor]:
        num_bytes = num_outputs * in_size * self._dtype.itemsize
        return [self._random(num_outputs, in_size) for _ in range(max(1, min(16, COLD_BYTES // num_bytes)))]

    def _random(self, *shape: int) -> torch.Tensor:
        scale = shape[-1] ** -0.25 if len(shape) > 1 else 1.0  # products of two have about the size of one
        return (torch.randn(shape, device=self._device) * scale).to(self._dtype)
