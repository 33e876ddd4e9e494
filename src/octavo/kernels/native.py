"""Octavo's own C++ kernels for CPUs. Tensors are passed to `kernels/cpu` as addresses and sizes.

bfloat16, float16 or float32, batch-invariant: a row's result has the same bits whatever other rows are computed with
it, on any number of threads. The bits depend on the ISA level: AMX tiles and vectors accumulate and round differently.

Legend: T = tokens, K = input size, N = output size, D = hidden or head size, I = intermediate size.
"""

import hashlib
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import local
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.gguf.types import GGML_NUMBERS, GgmlType
from octavo.kernels.blocks import BlockFormat
from octavo.kernels.large_pages import zeros_on_large_pages
from octavo.kernels.native_states import NativeStates
from octavo.kernels.native_weights import (
    NO_ADDRESS,
    LinearSpec,
    NativeLinear,
    WeightKind,
    address,
    make_weight_kinds,
    native_dtype,
)
from octavo.kernels.quantization import GROUP_SIZES, Weight, WeightFormat
from octavo.kernels.reference import ExpertAdapters, LoraAdapters
from octavo.kernels.types import (
    SILU,
    Activation,
    Fused,
    LinearRole,
    PackedExperts,
    PackedHeads,
    PackedLinear,
    PartNorms,
    Routes,
    Routing,
)

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu

# Sampling parameters of a row: `DrawRow` of kernels/cpu/draw.h.
DRAW_ROW = np.dtype(
    {
        "names": ["temperature", "top_p", "log_min_p", "top_k", "seed_low", "seed_high", "output_index", "unused"],
        "formats": [*[np.float64] * 3, np.int64, *[np.uint32] * 4],
    }
)


@cache
def _library_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeExperts(PackedExperts):
    """Experts with the C++ handle of all their linears."""

    handle: "_cpu.Experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeHeads(PackedHeads):
    """A linear for each head with the C++ handle of all."""

    handle: "_cpu.Heads"
    num_outputs: int  # N


class TapeBuffers:
    """Memory for the results of a tape's calls. A result's memory is reused once its tensor is freed."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}  # by size in bytes

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._all)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of this shape."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        if not free:
            free.append(torch.empty(size, dtype=torch.uint8))
            self._all += free
        buffer = free.pop()
        tensor = buffer.view(dtype).view(shape)
        weakref.finalize(tensor, free.append, buffer)
        return tensor


class Tape:
    """The native calls of a forward pass, recorded once and replayed in one call, without Python in between.

    Python between two calls costs more than its instructions. Every call streams megabytes of weights through the
    caches, so the interpreter always resumes with cold caches: 30 us per call, 5 ms per step of Qwen3-0.6B.
    """

    def __init__(self, kernels: "NativeKernels", calls: "_cpu.Tape") -> None:
        self._kernels, self.calls, self.buffers = kernels, calls, TapeBuffers()

    def replay(
        self,
        num_tokens: int,
        steps: "list[_cpu.AttentionStep]",
        state_steps: "Sequence[_cpu.StateStep]" = (),
        kept: Tensor | None = None,
    ) -> None:
        """Execute all calls for the first T rows of every tensor, no more than were recorded.

        `steps` are this step's attention for each KV group, `state_steps` those of recurrent groups, behind the others;
        `kept` [W] int64, of its rows those that `kept_rows` keeps; None: all.
        """
        rows = num_tokens, num_tokens if kept is None else len(kept), address(kept)
        self._kernels.timed(self._kernels.native.replay, self.calls, *rows, steps, list(state_steps))


class NativeKernels(NativeStates):
    """The ops, the same for all kinds of weights; packing is up to `kernels/native_weights.py`.

    In `dtype`; ops not overridden here run on the reference. With float32, all weights are dense.
    """

    is_batch_invariant = True
    reads_packed_rows = True
    records_calls = True

    def __init__(self, level: str, num_threads: int, dtype: torch.dtype = torch.bfloat16) -> None:
        from octavo.kernels.cpu import _cpu

        self._cpu, self.dtype = _cpu, dtype
        self.native = _cpu.Kernels(level, num_threads, native_dtype(dtype))
        self.name = f"native-{level}"
        self.compute_s = 0.0  # in replays and in what follows them: logits and sampling
        self._recording = local()  # thread-local: `buffers` while recording
        self.weight_kinds = make_weight_kinds(self.native, dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a result, in `dtype` or the kernels': from torch, or from the tape being recorded."""
        dtype, buffers = dtype or self.dtype, self._buffers
        return torch.empty(shape, dtype=dtype) if buffers is None else buffers.empty(shape, dtype)

    @property
    def _buffers(self) -> TapeBuffers | None:
        """The buffers of the tape that this thread records."""
        return getattr(self._recording, "buffers", None)

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Record the native calls of this thread instead of making them.

        The tape refers to tensors by address: those that come from outside must stay alive.
        """
        tape = Tape(self, self._cpu.Tape())
        self._recording.buffers = tape.buffers
        self.native.begin_recording(tape.calls)
        try:
            yield tape
        finally:
            self.native.end_recording()
            self._recording.buffers = None

    def timed(self, op: Callable[..., None], *args: Any) -> None:
        """Run a native call and add its time to `compute_s`."""
        start_s = time.perf_counter()
        op(*args)
        self.compute_s += time.perf_counter() - start_s

    @property
    def layout(self) -> str:
        # Another build may use another layout, so the library's digest is part of the name.
        return f"{self.name}-{self.dtype}-{_library_digest(self._cpu.__file__)}"

    def computes(self, form: WeightFormat) -> bool:
        return type(form) in self.weight_kinds and (isinstance(form, BlockFormat) or form.group_size in GROUP_SIZES)

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, role: LinearRole = "plain", form: WeightFormat | None = None
    ) -> PackedLinear:
        num_outputs, in_size = weight.shape
        return self._kind_of(form).pack(weight, bias, LinearSpec(num_outputs, in_size, role, form))

    def adopt_linear(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], role: LinearRole, form: WeightFormat | None = None
    ) -> PackedLinear:
        return self._kind_of(form).bind(tensors, LinearSpec(*shape, role, form))

    def first_outputs(self, packed: PackedLinear, count: int) -> PackedLinear:
        assert isinstance(packed, NativeLinear), "packed by other kernels"
        spec = packed.spec.first(count)
        return self._kind_of(spec.form).bind(packed.packed_tensors(), spec)

    def _kind_of(self, form: WeightFormat | None) -> WeightKind:
        if type(form) not in self.weight_kinds:
            raise TypeError(f"{self.name} has no kernels for weights of {form}")
        return self.weight_kinds[type(form)]

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._linear(x.contiguous(), packed, self.dtype, self._cpu.Output.PLAIN)

    def kept_rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        if self._buffers is None:
            return super().kept_rows(x, kept)
        x, out = x.contiguous(), self.empty(*x.shape, dtype=x.dtype)
        self.native.keep_rows(x.data_ptr(), x.shape[1] * x.itemsize, out.data_ptr())
        return out

    def select_columns(self, x: Tensor, order: Tensor) -> Tensor:
        x, out = x.contiguous(), self.empty(len(x), len(order))
        self.native.select_columns(self._rows(x), order.data_ptr(), len(order), out.data_ptr())
        return out

    def logits_linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._linear(x.contiguous(), packed, torch.float32, self._cpu.Output.FLOAT32)

    def logits_argmax(self, x: Tensor, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        argmax = torch.empty(len(x), 2, dtype=torch.int32)  # a float32's bits, an index
        self.timed(self.native.argmax, self._rows(x), _handle(packed), argmax.data_ptr())
        bits, ids = argmax.unbind(1)
        return bits.view(torch.float32), ids.long()

    def draw(self, logits: Tensor, rows: NDArray[np.void]) -> tuple[Tensor, Tensor]:
        """Return (tokens [S] int64, largest logits [S]) of logits [S, V] float32, by parameters `rows` [S] of DRAW_ROW.

        A token is -1 where only `sampling/draw.py` can decide, and undefined where the largest logit is not finite.
        """
        assert logits.dtype == torch.float32
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        token_ids, max_logit = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        results = token_ids.data_ptr(), max_logit.data_ptr()
        self.timed(self.native.draw, logits.data_ptr(), num_rows, vocab_size, rows.ctypes.data, *results)
        return token_ids, max_logit

    def activated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
        x, out = x.contiguous(), self.empty(len(x), _handle(packed).out_size)
        output = self._cpu.Output.GATED if activation.is_gated else self._cpu.Output.UNGATED
        self.native.linear(self._activated_rows(x, activation), _handle(packed), output, out.data_ptr())
        return out

    def gated_linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        x, out = x.contiguous(), self.empty(len(x), packed.num_outputs)
        self.native.linear(self._rows(x), _handle(packed), self._cpu.Output.GATES_AND_UPS, out.data_ptr())
        return out

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        x, out = x.contiguous(), self.empty(len(x), x.shape[1] // 2 if activation.is_gated else x.shape[1])
        self.native.activate(self._activated_rows(x, activation), out.data_ptr())
        return out

    def gated_product(self, gate: Tensor, x: Tensor, first: int, activation: Activation) -> Tensor:
        gate, out = gate.contiguous(), self.empty(*gate.shape)
        factors = x.data_ptr() + first * x.element_size()
        self.native.gated_product(self._activated_rows(gate, activation), factors, x.stride(0), out.data_ptr())
        return out

    def scaled_sum(self, x: Tensor, residual: Tensor | None, scale: float) -> Tensor:
        x, out = x.contiguous(), self.empty(*x.shape)
        residual = None if residual is None else residual.contiguous()
        fused = self._cpu.Fused(address(residual), NO_ADDRESS, 0.0, 0.0, _native_activation(SILU))
        num_rows, size = x.shape
        rows = self._cpu.Rows.fused(x.data_ptr(), num_rows, size, fused, NO_ADDRESS)
        self.native.scaled_sum(rows, scale, out.data_ptr())
        return out

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return zeros_on_large_pages(shape, dtype)

    def add_lora(self, base: Tensor, x: Tensor, adapters: LoraAdapters, adapter_ids: Tensor) -> Tensor:
        """In place: `base` is the result, or a copy of it where its rows are not contiguous."""
        assert base.dtype == x.dtype == adapters.down.dtype == adapters.up.dtype == self.dtype
        x, base, adapter_ids = x.contiguous(), base.contiguous(), adapter_ids.contiguous()
        down, up, ranks = (tensor.data_ptr() for tensor in (adapters.down, adapters.up, adapters.ranks))
        slots = self._cpu.LoraSlots(down, up, ranks, len(adapters.ranks), adapters.max_rank, list(adapters.parts))
        self.native.add_lora(self._rows(x), slots, adapter_ids.data_ptr(), base.data_ptr())
        return base

    def normed_linear(self, x: Tensor, fused: Fused, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        out = self.empty(len(x), _handle(packed).out_size)
        rows, total = self._fused_rows(x, fused)
        self.native.linear(rows, _handle(packed), self._cpu.Output.PLAIN, out.data_ptr())
        return out, total

    def mlp(self, x: Tensor, fused: Fused, up: PackedLinear, down: PackedLinear) -> tuple[Tensor, Tensor]:
        if _is_dense(up) != _is_dense(down):
            return super().mlp(x, fused, up, down)  # the fused op supports either dense or low-bit weights
        out = self.empty(len(x), _handle(down).out_size)
        rows, total = self._fused_rows(x, fused)
        self.native.mlp(rows, _handle(up), _handle(down), out.data_ptr())
        return out, total

    def pack_heads(self, linears: Sequence[PackedLinear], in_size: int) -> PackedHeads:
        handles = list(map(_handle, linears))
        heads, num_outputs = self._cpu.Heads(handles, in_size), handles[0].out_size
        return NativeHeads(linears=tuple(linears), in_size=in_size, handle=heads, num_outputs=num_outputs)

    def head_linears(self, x: Tensor, heads: PackedHeads) -> Tensor:
        assert isinstance(heads, NativeHeads), "packed by other kernels"
        x, num_heads = x.contiguous(), len(heads.linears)
        out = self.empty(len(x), x.shape[1] + num_heads * (heads.num_outputs - heads.in_size))
        self.timed(self.native.head_linears, self._rows(x), heads.handle, out.data_ptr())
        return out

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        if len({linear.form for linear in (*gate_up, *down) if isinstance(linear, NativeLinear)}) > 1:
            raise UnsupportedModelError("the experts of a layer have linears of different formats on this rank")
        handle = self._cpu.Experts(list(map(_handle, gate_up)), list(map(_handle, down)))
        return NativeExperts(gate_up=tuple(gate_up), down=tuple(down), handle=handle)

    def route(self, x: Tensor, router: PackedLinear, routing: Routing) -> Routes:
        x, shape = x.contiguous(), (len(x), routing.num_choices)
        routes = Routes(expert_ids=torch.empty(shape, dtype=torch.int64), weights=torch.empty(shape))
        addresses = routes.expert_ids.data_ptr(), routes.weights.data_ptr()
        self.native.route(self._rows(x), _handle(router), _native_routing(routing), *addresses)
        return routes

    def expert_rows(
        self, x: Tensor, token_ids: Tensor, expert_ids: Tensor, experts: PackedExperts, activation: Activation
    ) -> Tensor:
        x, token_ids, expert_ids = x.contiguous(), token_ids.contiguous(), expert_ids.contiguous()
        out = torch.empty(len(expert_ids), x.shape[1], dtype=self.dtype)
        rows, addresses = self._activated_rows(x, activation), (token_ids.data_ptr(), expert_ids.data_ptr())
        self.native.expert_rows(rows, _experts_handle(experts), len(expert_ids), *addresses, out.data_ptr())
        return out

    def combine_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        num_tokens, num_choices, size = rows.shape
        out = torch.empty(num_tokens, size, dtype=self.dtype)
        addresses = rows.data_ptr(), weights.data_ptr()
        self.native.combine_experts(*addresses, num_tokens, num_choices, size, out.data_ptr())
        return out

    def moe(
        self,
        x: Tensor,
        fused: Fused,
        router: PackedLinear,
        routing: Routing,
        experts: PackedExperts,
        load: Tensor,
        is_counted: Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert is_counted is None, "steps are not padded on a CPU"
        if adapters is not None:
            return super().moe(x, fused, router, routing, experts, load, None, adapters)
        out = self.empty(*x.shape)
        rows, total = self._fused_rows(x, fused)
        choice, handle = _native_routing(routing), _experts_handle(experts)
        self.native.moe(rows, _handle(router), choice, handle, load.data_ptr(), out.data_ptr())
        return out, total

    def gate(self, x: Tensor, logits: Tensor) -> Tensor:
        assert logits.stride(1) == 1
        x, out = x.contiguous(), self.empty(*x.shape)
        num_rows, size = x.shape
        strides = logits.stride(0), size // logits.shape[1]
        self.native.gate(x.data_ptr(), logits.data_ptr(), num_rows, size, *strides, out.data_ptr())
        return out

    def packed_rows(self, ids: Tensor, packed: PackedLinear, size: int) -> Tensor:
        ids, out = ids.to(torch.int64).contiguous(), torch.empty(len(ids), size, dtype=self.dtype)
        self.native.packed_rows(_handle(packed), size, len(ids), ids.data_ptr(), out.data_ptr())
        return out

    def decoded_rows(self, rows: Tensor, kind: GgmlType) -> Tensor:
        if not kind.is_quantized or kind.is_decoded:
            return super().decoded_rows(rows, kind)
        rows, num_blocks = rows.contiguous(), rows.numel() // kind.block_bytes
        out = torch.empty(len(rows), num_blocks // max(1, len(rows)) * kind.block_size)
        self._cpu.decode_blocks(GGML_NUMBERS[kind.name], rows.data_ptr(), num_blocks, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        fused = Fused(residual=None, norm_weight=weight.to(self.dtype), eps=eps, norm_offset=offset)
        return self.add_rms_norm(x, fused)[0]

    def add_rms_norm(self, x: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
        out = self.empty(*x.shape)
        rows, total = self._fused_rows(x, fused)
        self.native.rms_norm(rows, out.data_ptr())
        return out, total

    def part_squares(self, x: Tensor, sizes: tuple[int, int], num_counted: int) -> Tensor:
        squares = self.empty(len(x), len(sizes), dtype=torch.float32)
        self.native.part_squares(self._rows(x.contiguous()), list(sizes), num_counted, squares.data_ptr())
        return squares

    def scale_parts(self, x: Tensor, squares: Tensor, norms: PartNorms) -> Tensor:
        """In place."""
        x, weights = x.contiguous(), [weight.data_ptr() for weight in norms.weights]
        totals = [float(total) for total in norms.totals]
        sizes, sums = list(norms.sizes), squares.data_ptr()
        self.native.scale_parts(self._rows(x), sizes, sums, weights, totals, norms.eps)
        return x

    def _linear(self, x: Tensor, packed: PackedLinear, dtype: torch.dtype, output: "_cpu.Output") -> Tensor:
        out = self.empty(len(x), _handle(packed).out_size, dtype=dtype)
        self.timed(self.native.linear, self._rows(x), _handle(packed), output, out.data_ptr())
        return out

    def _rows(self, x: Tensor) -> "_cpu.Rows":
        num_rows, size = x.shape
        return self._cpu.Rows(x.data_ptr(), num_rows, size)

    def _activated_rows(self, x: Tensor, activation: Activation) -> "_cpu.Rows":
        """Return rows x [T, K] unchanged, for a linear followed by this activation."""
        fused = self._cpu.Fused(NO_ADDRESS, NO_ADDRESS, 0.0, 0.0, _native_activation(activation))
        num_rows, size = x.shape
        return self._cpu.Rows.fused(x.data_ptr(), num_rows, size, fused, NO_ADDRESS)

    def _fused_rows(self, x: Tensor, fused: Fused) -> tuple["_cpu.Rows", Tensor]:
        """Return (rows x [..., K] as a fused op takes them, memory for their sum with the residual, or x)."""
        x, size = x.contiguous(), x.shape[-1]
        residual = None if fused.residual is None else fused.residual.contiguous()
        total = x if residual is None else self.empty(*x.shape)
        weight, activation = fused.norm_weight.data_ptr(), _native_activation(fused.activation)
        centered = fused.is_centered, address(fused.norm_bias)
        native = self._cpu.Fused(address(residual), weight, fused.eps, fused.norm_offset, activation, *centered)
        return self._cpu.Rows.fused(x.data_ptr(), x.numel() // size, size, native, total.data_ptr()), total


def _native_routing(routing: Routing) -> "_cpu.Routing":
    """Return it for C++, with the correction's address: the layer keeps that tensor."""
    from octavo.kernels.cpu import _cpu

    rule = routing.rule
    return _cpu.Routing(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        renormalizes=routing.renormalizes,
        has_shared=routing.has_shared,
        chooses_by_logit=rule.chooses_by_logit,
        is_softmax=rule.scores == "softmax",
        num_groups=rule.num_groups,
        top_groups=rule.top_groups,
        group_best=rule.group_best,
        correction=address(routing.correction),
        scale=rule.scale,
        epsilon=rule.epsilon,
        gates_shared=rule.gates_shared,
    )


@cache
def _native_activation(activation: Activation) -> "_cpu.Activation":
    from octavo.kernels.cpu import _cpu

    return _cpu.Activation(activation.kind, activation.limit, activation.alpha)


def _handle(packed: PackedLinear) -> "_cpu.PackedWeight":
    assert isinstance(packed, NativeLinear), "packed by other kernels"
    return packed.handle


def _is_dense(packed: PackedLinear) -> bool:
    return isinstance(packed, NativeLinear) and packed.form is NoneType


def _experts_handle(experts: PackedExperts) -> "_cpu.Experts":
    assert isinstance(experts, NativeExperts), "packed by other kernels"
    return experts.handle
