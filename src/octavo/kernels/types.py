"""What kernels and layers hand to one another: packed weights, routing, adapters. A leaf: it imports no kernels.

Legend: T = tokens, K = input size, N = output size, X = experts, C = experts that a token chooses; of adapters:
A = their number, R = rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from octavo.errors import UnsupportedModelError
from octavo.kernels.quantization import WeightFormat

ActivationKind = Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu"]
NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class Activation:
    """What an MLP does between its two linears; `kernels/activation.py` computes it."""

    kind: ActivationKind = "silu"
    limit: float = 7.0  # of clamped_swiglu: the bound on gates, and on what they gate
    alpha: float = 1.702  # of clamped_swiglu: the factor in its sigmoid

    @property
    def is_gated(self) -> bool:
        """Whether the first linear gives gates and what they gate, or one part alone."""
        return self.kind != "relu2"


SILU = Activation()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """What fused ops do around their linears: add a residual, normalize, activate. `Fused` of `kernels/cpu/ops.h`.

    Raises:
        UnsupportedModelError: a kind of norm that no kernels have.
    """

    residual: torch.Tensor | None  # [T, K], added to the rows first
    norm_weight: torch.Tensor  # [K]
    eps: float
    norm_kind: NormKind = "rms"
    norm_offset: float = 0.0  # added to the norm's weight: 1 where checkpoints hold the weight less one
    activation: Activation = SILU  # between the linears of an MLP

    def __post_init__(self) -> None:
        if self.norm_kind != "rms":
            raise UnsupportedModelError(f"norm_kind={self.norm_kind!r} is not supported; known: rms")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """The weights of a linear layer, ready to compute. Only the kernels that packed it know the layout of `weight`."""

    weight: torch.Tensor
    bias: torch.Tensor | None  # [N]
    num_outputs: int  # N; 2 * I where it is gated


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts:
    """MLPs that tokens choose among, by number: those that this rank holds."""

    gate_up: tuple[PackedLinear, ...]  # activated
    down: tuple[PackedLinear, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How a token chooses its C experts: `top_k` of X, and the shared one, number X, where there is one."""

    num_experts: int  # X
    top_k: int
    renormalizes: bool  # the weights of the chosen add up to 1; else they are their shares of all X
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
    """Low-rank additions to one linear layer, by number; lower ranks than the largest have zeros behind them."""

    down: torch.Tensor  # [A, R, K]
    up: torch.Tensor  # [A, N, R], its factor alpha / rank among it


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
