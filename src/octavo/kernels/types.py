"""Types shared by kernels and layers: packed weights, routing. A leaf: it imports no kernels.

Legend: T = tokens, K = input size, N = output size, X = experts, C = experts per token.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from torch import Tensor

from octavo.config.layers import RoutingSpec

# The third and fourth have no gate.
ActivationKind = Literal["silu", "gelu_tanh", "relu2", "plain_gelu", "clamped_swiglu", "scaled_silu"]
GeluKind = Literal["gelu", "gelu_tanh", "quick_gelu"]  # by the error function, a tanh, or a sigmoid
# Which ops read a linear. Gated ones are [2 * I, K], gates first; a router is [X, D], or [X + 1, D] with a gated
# shared expert, and computed in float32.
LinearRole = Literal["plain", "gated", "logits", "router"]


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation between an MLP's two linears; `Kernels.activate` defines it."""

    kind: ActivationKind = "silu"
    limit: float = 7.0  # of clamped_swiglu: the bound on gates and ups
    alpha: float = 1.702  # of clamped_swiglu: the factor in its sigmoid; of scaled_silu: of gates

    @property
    def is_gated(self) -> bool:
        """Whether the first linear yields gates and ups, or one part alone."""
        return self.kind not in ("relu2", "plain_gelu")


SILU = Activation()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """Prologue and epilogue of fused ops: residual, norm, activation. `Fused` of `kernels/cpu/ops.h`."""

    residual: Tensor | None  # [T, K], added to the rows first
    norm_weight: Tensor  # [K]
    eps: float
    norm_offset: float = 0.0  # added to the norm's weight: 1 where checkpoints hold the weight less one
    activation: Activation = SILU  # between the linears of an MLP
    is_centered: bool = False  # a layer norm; else an RMS norm
    norm_bias: Tensor | None = None  # [K], of a layer norm


@dataclass(frozen=True, kw_only=True, slots=True)
class PartNorms:
    """RMS norms over two parts at the front of a row, one behind the other; other ranks may have more of each."""

    sizes: tuple[int, int]  # elements
    totals: tuple[int, int]  # of all ranks
    weights: tuple[Tensor, Tensor]  # [size] float32
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinear:
    """The weights of a linear layer, ready to compute. Only the kernels that packed it know the layout of `weight`."""

    weight: Tensor
    bias: Tensor | None  # [N]
    num_outputs: int  # N; 2 * I where it is gated

    def packed_tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name, to be saved."""
        every = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: value for name, value in every.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts:
    """The experts of a layer that this rank holds, by number."""

    gate_up: tuple[PackedLinear, ...]  # activated
    down: tuple[PackedLinear, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedHeads:
    """A linear for each head, all of one size, ready to compute."""

    linears: tuple[PackedLinear, ...]
    in_size: int  # K


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How a token chooses its C experts: `top_k` of X, and the shared one, number X, if any.

    `kernels/routing.py` is the definition.
    """

    num_experts: int  # X
    top_k: int
    renormalizes: bool  # the weights of the chosen add up to 1; else they are their shares of all X
    has_shared: bool  # every token also takes it; its weight is the sigmoid of logit X, or 1
    rule: RoutingSpec = field(default_factory=RoutingSpec)
    correction: Tensor | None = field(default=None, compare=False)  # [X] float32, if the rule has one

    @property
    def num_choices(self) -> int:
        """Return C."""
        return self.top_k + self.has_shared

    @property
    def num_logits(self) -> int:
        """Return the outputs of the router."""
        return self.num_experts + (self.has_shared and self.rule.gates_shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Each token's experts and their weights, the heaviest first, the shared one last."""

    expert_ids: Tensor  # [T, C] int64
    weights: Tensor  # [T, C] float32
