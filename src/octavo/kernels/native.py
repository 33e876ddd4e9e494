"""Octavo's own C++ kernels for CPUs. Tensors go to `kernels/cpu` as addresses and sizes.

bfloat16 or float32, row-invariant: a row's result has the same bits whatever other rows are computed with it, on
however many threads. Which bits those are depends on the ISA level: matrix tiles and vectors round in another order.

Legend: T = tokens, K = input size, N = output size, D = hidden or head size, I = intermediate size.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.dispatch import KeepsPacked, LinearRole, PackedExperts, PackedLinear, Routes, Routing
from octavo.kernels.large_pages import zeros_on_large_pages
from octavo.kernels.quantization import WeightFormat
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.tape import Tape, TapeBuffers

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu

_NO_ADDRESS = 0
# What a row wants of a draw: `DrawRow` of kernels/cpu/draw.h.
DRAW_ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("log_min_p", np.float64),
        ("top_k", np.int64),
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("output_index", np.uint32),
        ("unused", np.uint32),
    ]
)


@cache
def _library_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeLinear(PackedLinear):
    """A packed map with what the C++ side knows of it: sizes, and the addresses of `weight` and `bias`."""

    handle: "_cpu.PackedWeight"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeExperts(PackedExperts):
    """Experts whose maps the C++ side has side by side."""

    handle: "_cpu.Experts"


class NativeKernels(ReferenceKernels, KeepsPacked):
    """See `Kernels`. In `dtype`, bfloat16 or float32; what is not here is computed by the reference."""

    is_row_invariant = True
    packing_copies = False
    reads_packed_rows = True

    def __init__(self, level: str, num_threads: int, dtype: torch.dtype = torch.bfloat16) -> None:
        from octavo.kernels.cpu import _cpu

        assert dtype in (torch.bfloat16, torch.float32), f"there are no kernels for {dtype}"
        self._cpu, self.dtype = _cpu, dtype
        self.native = _cpu.Kernels(level, num_threads, is_float32=dtype == torch.float32)
        self.name = f"native-{level}"
        self._recording = local()  # of a thread: `buffers` while it records

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for a result, in `dtype` or the kernels': torch's, or of the tape that this thread records."""
        dtype, buffers = dtype or self.dtype, self._buffers
        return torch.empty(shape, dtype=dtype) if buffers is None else buffers.empty(shape, dtype)

    @property
    def _buffers(self) -> TapeBuffers | None:
        """Of the tape that this thread records."""
        return getattr(self._recording, "buffers", None)

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Note down the native calls of this thread instead of making them.

        The tape's calls name the tensors that they were given by address: those that come from outside must stay.
        """
        tape = Tape(self.native)
        self._recording.buffers = tape.buffers
        self.native.begin_recording(tape.calls)
        try:
            yield tape
        finally:
            self.native.end_recording()
            self._recording.buffers = None

    @property
    def layout(self) -> str:
        """See `KeepsPacked`. Another build may lay out otherwise, so its library is part of the name."""
        return f"{self.name}-{self.dtype}-{_library_digest(self._cpu.__file__)}"

    def packed_tensors(self, packed: PackedLinear) -> dict[str, torch.Tensor]:
        every = {spec.name: getattr(packed, spec.name) for spec in fields(packed)}
        return {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}

    def adopt_linear(
        self,
        tensors: Mapping[str, torch.Tensor],
        num_outputs: int,
        in_size: int,
        role: LinearRole,
        form: WeightFormat | None = None,
    ) -> PackedLinear:
        out_size = num_outputs // 2 if role == "gated" else num_outputs
        return self._bind(tensors["weight"], tensors.get("bias"), num_outputs, out_size)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self._pack(weight, bias, is_gated=False)

    def pack_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self._pack(weight, bias, is_gated=True)

    def pack_router(self, weight: torch.Tensor) -> PackedLinear:
        return self._pack(weight, None, is_gated=False)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._linear(x.contiguous(), packed, self.dtype, self._cpu.Output.PLAIN)

    def kept_rows(self, x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        if self._buffers is None:
            return super().kept_rows(x, kept)
        x, out = x.contiguous(), self.empty(*x.shape, dtype=x.dtype)
        self.native.keep_rows(x.data_ptr(), x.shape[1] * x.itemsize, out.data_ptr())
        return out

    def logits_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._linear(x.contiguous(), packed, torch.float32, self._cpu.Output.FLOAT32)

    def largest_logits(self, x: torch.Tensor, packed: PackedLinear) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        largest = torch.empty(len(x), 2, dtype=torch.int32)  # a float32's bits, an index
        self.native.largest(self._rows(x), _handle(packed), largest.data_ptr())
        bits, ids = largest.unbind(1)
        return bits.view(torch.float32), ids.long()

    def draw(self, logits: torch.Tensor, rows: NDArray[np.void]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens [S] int64, largest logits [S]) of logits [S, V] float32, as `rows` [S] of DRAW_ROW ask for.

        A token is -1 where only `sampling/draw.py` can tell, and anything where the largest logit is not finite.
        """
        assert logits.dtype == torch.float32
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        token_ids, largest = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
        results = token_ids.data_ptr(), largest.data_ptr()
        self.native.draw(logits.data_ptr(), num_rows, vocab_size, rows.ctypes.data, *results)
        return token_ids, largest

    def gated_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._linear(x.contiguous(), packed, self.dtype, self._cpu.Output.GATED)

    def normed_linear(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        packed: PackedLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        out, total = self.empty(len(x), _handle(packed).out_size), x if residual is None else self.empty(*x.shape)
        rows = self._normed_rows(x, residual, norm_weight, eps, total)
        self.native.linear(rows, _handle(packed), self._cpu.Output.PLAIN, out.data_ptr())
        return out, total

    def gated_mlp(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = self.empty(len(x), _handle(down).out_size), self.empty(*x.shape)
        rows = self._normed_rows(x, residual, norm_weight, eps, total)
        self.native.mlp(rows, _handle(gate_up), _handle(down), out.data_ptr())
        return out, total

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        handle = self._cpu.Experts(list(map(_handle, gate_up)), list(map(_handle, down)))
        return NativeExperts(gate_up=tuple(gate_up), down=tuple(down), handle=handle)

    def route(self, x: torch.Tensor, router: PackedLinear, routing: Routing) -> Routes:
        x, shape = x.contiguous(), (len(x), routing.num_choices)
        routes = Routes(expert_ids=torch.empty(shape, dtype=torch.int64), weights=torch.empty(shape))
        addresses = routes.expert_ids.data_ptr(), routes.weights.data_ptr()
        self.native.route(self._rows(x), _handle(router), self._routing(routing), *addresses)
        return routes

    def expert_rows(
        self, x: torch.Tensor, token_ids: torch.Tensor, expert_ids: torch.Tensor, experts: PackedExperts
    ) -> torch.Tensor:
        x, token_ids, expert_ids = x.contiguous(), token_ids.contiguous(), expert_ids.contiguous()
        out = torch.empty(len(expert_ids), x.shape[1], dtype=self.dtype)
        addresses = token_ids.data_ptr(), expert_ids.data_ptr(), out.data_ptr()
        self.native.expert_rows(self._rows(x), _experts_handle(experts), len(expert_ids), *addresses)
        return out

    def combine_experts(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        num_tokens, num_choices, size = rows.shape
        out = torch.empty(num_tokens, size, dtype=self.dtype)
        sizes = num_tokens, num_choices, size
        self.native.combine_experts(rows.data_ptr(), weights.data_ptr(), *sizes, out.data_ptr())
        return out

    def moe(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        router: PackedLinear,
        routing: Routing,
        experts: PackedExperts,
        load: torch.Tensor,
        is_counted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert is_counted is None, "no step is padded on a CPU"
        x, residual = x.contiguous(), residual.contiguous()
        out, total = self.empty(*x.shape), self.empty(*x.shape)
        rows, choice = self._normed_rows(x, residual, norm_weight, eps, total), self._routing(routing)
        self.native.moe(rows, _handle(router), choice, _experts_handle(experts), load.data_ptr(), out.data_ptr())
        return out, total

    def packed_rows(self, ids: torch.Tensor, packed: PackedLinear, size: int) -> torch.Tensor:
        ids, out = ids.to(torch.int64).contiguous(), torch.empty(len(ids), size, dtype=self.dtype)
        self.native.packed_rows(_handle(packed), size, len(ids), ids.data_ptr(), out.data_ptr())
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, weight = x.contiguous(), weight.to(self.dtype)
        out, size = self.empty(*x.shape), x.shape[-1]
        num_rows = x.numel() // size
        rows = self._cpu.Rows(x.data_ptr(), num_rows, size, _NO_ADDRESS, weight.data_ptr(), eps, _NO_ADDRESS)
        self.native.rms_norm(rows, out.data_ptr())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = self.empty(*x.shape), self.empty(*x.shape)
        self.native.rms_norm(self._normed_rows(x, residual, weight, eps, total), out.data_ptr())
        return out, total

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool) -> PackedLinear:
        weight = weight.contiguous()
        num_outputs, in_size = weight.shape
        out_size = num_outputs // 2 if is_gated else num_outputs
        packed = zeros_on_large_pages((self._cpu.packed_size(in_size, out_size, is_gated),), self.dtype)
        self.native.pack_linear(weight.data_ptr(), in_size, out_size, is_gated, packed.data_ptr())
        return self._bind(packed, pack_bias(bias, is_gated=is_gated), num_outputs, out_size)

    def _bind(self, packed: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, out_size: int) -> NativeLinear:
        handle = self._cpu.PackedWeight(out_size, packed.data_ptr(), _address(bias))
        return NativeLinear(weight=packed, bias=bias, num_outputs=num_outputs, handle=handle)

    def _linear(self, x: torch.Tensor, packed: PackedLinear, dtype: torch.dtype, output: "_cpu.Output") -> torch.Tensor:
        out = self.empty(len(x), _handle(packed).out_size, dtype=dtype)
        self.native.linear(self._rows(x), _handle(packed), output, out.data_ptr())
        return out

    def _routing(self, routing: Routing) -> "_cpu.Routing":
        made: _cpu.Routing = self._cpu.Routing(
            routing.num_experts, routing.top_k, routing.renormalises, routing.has_shared
        )
        return made

    def _rows(self, x: torch.Tensor) -> "_cpu.Rows":
        num_rows, size = x.shape
        return self._cpu.Rows(x.data_ptr(), num_rows, size, _NO_ADDRESS, _NO_ADDRESS, 0.0, _NO_ADDRESS)

    def _normed_rows(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, total: torch.Tensor
    ) -> "_cpu.Rows":
        addresses = x.data_ptr(), _address(residual), weight.data_ptr(), total.data_ptr()
        num_rows, size = x.shape
        return self._cpu.Rows(addresses[0], num_rows, size, addresses[1], addresses[2], eps, addresses[3])


def _handle(packed: PackedLinear) -> "_cpu.PackedWeight":
    assert isinstance(packed, NativeLinear), "packed by other kernels"
    return packed.handle


def _experts_handle(experts: PackedExperts) -> "_cpu.Experts":
    assert isinstance(experts, NativeExperts), "packed by other kernels"
    return experts.handle


def _address(tensor: torch.Tensor | None) -> int:
    return _NO_ADDRESS if tensor is None else tensor.data_ptr()


def pack_bias(bias: torch.Tensor | None, *, is_gated: bool) -> torch.Tensor | None:
    """Bring a bias into the order of the panels' outputs, 32 each: float32, padded with zeros."""
    if bias is None:
        return None
    parts = bias.float().view(2, -1) if is_gated else bias.float().view(1, -1)  # [1 or 2, N or I]
    width = 32 // len(parts)
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[1] % width))
    return padded.view(len(parts), -1, width).transpose(0, 1).contiguous().view(-1)
