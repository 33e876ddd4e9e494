"""`Kernels`: the ops that layers are made of, and the choice of who computes them.

Legend: T = tokens, K = input size, N = output size, V = vocabulary, D = hidden or head size, H = heads,
I = intermediate size, X = experts, C = experts that a token chooses, R = pairs of a token and an expert; of adapters:
A = their number, R = rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol

import torch

from octavo.kernels.quantization import QuantizedWeight, WeightFormat
from octavo.kernels.triton.selection import uses_triton


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """The weights of a linear map, ready to compute. Only the kernels that packed it know the layout of `weight`."""

    weight: torch.Tensor
    bias: torch.Tensor | None  # [N]
    num_outputs: int  # N; 2 * I where it is gated


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts:
    """MLPs that tokens choose among, by number: those that this rank holds."""

    gate_up: tuple[PackedLinear, ...]  # gated
    down: tuple[PackedLinear, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How a token chooses its C experts: `top_k` of X, and the shared one, number X, where there is one."""

    num_experts: int  # X
    top_k: int
    renormalises: bool  # the weights of the chosen add up to 1; else they are their shares of all X
    has_shared: bool  # every token has it too; its weight is the sigmoid of logit number X

    @property
    def num_choices(self) -> int:
        """Return C."""
        return self.top_k + self.has_shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Which experts each token chose, the heaviest first, the shared one last, and what each one's answer weighs."""

    expert_ids: torch.Tensor  # [T, C] int64
    weights: torch.Tensor  # [T, C] float32


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapters:
    """Low-rank additions to one linear map, by number; lower ranks than the largest have zeros behind them."""

    down: torch.Tensor  # [A, R, K]
    up: torch.Tensor  # [A, N, R], its factor alpha / rank among it


class Kernels(Protocol):
    """All ops of one device and dtype. An object given to layers at construction; stateless, safe to share.

    Every op leaves its arguments as they are, but for `load` of `moe`. What each computes is written down in
    `kernels/reference.py`.
    """

    name: str
    is_row_invariant: bool  # a row's result has the same bits whatever other rows are computed with it
    packing_copies: bool  # a weight that is packed and also read plain (a tied logits head) exists twice
    captures_experts: bool  # a step with experts can be captured: nothing of it waits for the device
    reads_packed_rows: bool  # `packed_rows` is there: a tied logits head, once packed, is the embedding's table, too

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Bring weight [N, K] and bias [N] into the layout that `linear` reads. Once, at load."""
        ...

    def computes(self, form: WeightFormat) -> bool:
        """Say whether these kernels compute with weights of this form as they are."""
        ...

    def pack_quantized(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, form: WeightFormat, role: "LinearRole"
    ) -> PackedLinear:
        """Pack for an op of this role, in a form that is computed; a dense weight [N, K] is brought into it."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Map x [T, K] to [T, N]."""
        ...

    def pack_logits_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Like `pack_linear`, for `logits_linear`."""
        ...

    def kept_rows(self, x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Return the rows of x [T, D] that `kept` [W] int64 names, ascending; x itself for None."""
        ...

    def logits_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Map x [T, K] to [T, N] float32."""
        ...

    def largest_logits(self, x: torch.Tensor, packed: PackedLinear) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest of `logits_linear` [T] float32, and its first place [T] int64; NaN where any is."""
        ...

    def pack_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Like `pack_linear`, of weight [2 * I, K] and bias [2 * I], gates first, for `gated_linear`."""
        ...

    def gated_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Map x [T, K] to silu(gate(x)) * up(x), [T, I]."""
        ...

    def normed_linear(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        packed: PackedLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the map [T, N] of normalised x + residual, x + residual [T, K]); norm_weight is [K].

        Without a residual the sum is x itself.
        """
        ...

    def gated_mlp(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (down(gated(n)) [T, K] of n = normalised x + residual, x + residual [T, K]); norm_weight is [K]."""
        ...

    def pack_router(self, weight: torch.Tensor) -> PackedLinear:
        """Bring weight [X, D], or [X + 1, D] with a shared expert, into the layout that `route` reads."""
        ...

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        """Put experts together whose maps are packed: gated ones, and those behind them."""
        ...

    def route(self, x: torch.Tensor, router: PackedLinear, routing: Routing) -> Routes:
        """Let the tokens x [T, D] choose their experts."""
        ...

    def expert_rows(
        self, x: torch.Tensor, token_ids: torch.Tensor, expert_ids: torch.Tensor, experts: PackedExperts
    ) -> torch.Tensor:
        """Return [R, D]: row r is what expert expert_ids[r] makes of token token_ids[r] of x [T, D]; ids are int64."""
        ...

    def combine_experts(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add up rows [T, C, D] by weights [T, C] float32: [T, D]."""
        ...

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
        """Return (what the experts make of normalised x + residual [T, D], x + residual [T, D]); norm_weight is [D].

        Adds to load [X] int64 how many of the tokens chose each expert: the one argument that an op changes. Of some
        tokens, where is_counted [T] int64 is 1 for these and else 0: kernels of devices that capture steps know it.
        """
        ...

    def add_lora(
        self, base: torch.Tensor, x: torch.Tensor, adapters: LoraAdapters, adapter_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return base [T, N] with what adapter adapter_ids[t] [T] int64 makes of row t of x [T, K]; -1: nothing."""
        ...

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, D] of table [V, D] that ids [T] name."""
        ...

    def packed_rows(self, ids: torch.Tensor, packed: PackedLinear, size: int) -> torch.Tensor:
        """Return the rows [T, K] that ids [T] name of a weight [N, K] that `pack_logits_linear` packed; K is `size`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise x [..., D] over its last dimension and scale by weight [D]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised x + residual, x + residual), each [T, D]."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map gate_up [T, 2 * I], gate first, to silu(gate) * up, [T, I]."""
        ...

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, H, D] by cos, sin [T, D / 2] float32: element i pairs with element i + D / 2."""
        ...


LinearRole = Literal["plain", "gated", "logits", "router"]  # which way of packing a map has gone through


class KeepsPacked(ABC):
    """Kernels whose packed maps are plain tensors, which can be kept in a file and be taken up again."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """Name all that decides what packed bytes mean."""

    @abstractmethod
    def packed_tensors(self, packed: PackedLinear) -> dict[str, torch.Tensor]:
        """Return what a packed map consists of."""

    @abstractmethod
    def adopt_linear(
        self,
        tensors: Mapping[str, torch.Tensor],
        num_outputs: int,
        in_size: int,
        role: LinearRole,
        form: WeightFormat | None = None,
    ) -> PackedLinear:
        """Return the linear of such tensors, of weight [num_outputs, in_size] that was packed in a form, None: dense.

        They are used where they are.
        """


_NATIVE_DTYPES = frozenset({torch.bfloat16, torch.float32})
_REFERENCE = ("octavo.kernels.reference", "ReferenceKernels")
# Kernels of a CPU, where oneDNN computes with the dtype. All else is computed by the reference, wherever torch runs.
_ONEDNN = {
    torch.float32: ("octavo.kernels.cpu_float32", "Float32CpuKernels"),
    torch.bfloat16: ("octavo.kernels.cpu_half", "HalfCpuKernels"),
    torch.float16: ("octavo.kernels.cpu_half", "HalfCpuKernels"),
}


DENSE_ONLY: frozenset[WeightFormat | None] = frozenset({None})


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    forms: frozenset[WeightFormat | None] = DENSE_ONLY,
    *,
    deterministic: bool = False,
) -> Kernels:
    """Return the best kernels there are for this device and dtype, and for weights of these forms; None: dense ones.

    Whether they compute with a form is theirs to say. With `deterministic`, batch-invariant ones are preferred to
    faster ones; whether they are is theirs to say, too.
    """
    if uses_triton(device, dtype):
        return _triton_kernels(forms, deterministic=deterministic)
    if device.type == "cpu" and dtype in _NATIVE_DTYPES:
        from octavo.kernels.native_level import native_kernels

        if (native := native_kernels(dtype)) is not None:
            return native
    module, class_name = _ONEDNN[dtype] if device.type == "cpu" and _has_onednn(dtype) else _REFERENCE
    kernels: Kernels = getattr(import_module(module), class_name)()
    return kernels


def _triton_kernels(forms: frozenset[WeightFormat | None], *, deterministic: bool) -> Kernels:
    from octavo.kernels.triton.deterministic import DeterministicKernels
    from octavo.kernels.triton.kernels import TritonKernels
    from octavo.kernels.triton.quantized import QuantizedKernels

    if forms != DENSE_ONLY:
        return QuantizedKernels(forms, deterministic=deterministic)
    return DeterministicKernels() if deterministic else TritonKernels()


def _has_onednn(dtype: torch.dtype) -> bool:
    from octavo.kernels import onednn

    return onednn.is_supported(dtype)
