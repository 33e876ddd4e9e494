"""What the layers of a decoder are: `LayerSpec`, one for each, from the numbers in a checkpoint's configuration.

Counts are of the whole model, or, after sharding, of one rank. What a layer may be one of is tagged: the configuration
travels to other processes.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from octavo.contracts.abstract import AbstractStructMeta

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) and its long-context scalings.

    `original_max_position` is the context length before scaling. llama3 uses the two frequency factors, yarn
    (Peng et al. 2023, arXiv:2309.00071) the betas and the attention factor.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()  # of the frequencies one by one, where no kind describes them
    long_divisors: tuple[float, ...] = ()  # the same for requests that may go beyond `original_max_position`
    sections: tuple[int, ...] = ()  # frequencies by time, height and width (arXiv:2409.12191); (): all by one
    is_interleaved: bool = False  # the axes take turns (Qwen3-VL, arXiv:2511.21631); else each has a run of frequencies
    growth: "QueryGrowth | None" = None  # of a table for queries alone


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryGrowth:
    """Queries at position p are 1 + rate * ln(1 + (p + offset) // interval) times as large (arXiv:2501.19399)."""

    rate: float
    interval: int  # positions
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RotarySpec:
    """One table of angles. Several layers may rotate by the same one."""

    rope: RopeConfig
    width: int  # elements at the front of a head that are rotated


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """Attention that caches one vector per token for all heads (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    Its front, normalized, is what each head's keys and values are linears of; behind it is a part of the key that is
    rotated, the same for all heads. A head's key is `key_size` elements made of the front, then the rotated ones.
    """

    rank: int  # elements of the front
    rotary_size: int  # elements behind it
    key_size: int  # of a head's key, without the rotated part
    value_size: int  # of a head
    query_rank: int | None = None  # elements that queries are projected to first, and normalized; None: they are not
    norm_eps: float = 1e-6  # of the norms of both fronts

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return self.rank + self.rotary_size


# Of each head, of each element, or of each element where checkpoints hold its rows head by head with those of queries.
GateKind = Literal["heads", "elements", "elements_by_query"]


# Root mean square norms of each head, before rotation or behind it; of all heads together; or layer norms without
# biases, a weight for each head. The last two come before rotation.
HeadNormKind = Literal["each", "each_behind", "whole", "by_head"]


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """A layer that attends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: int | None = 0  # which of the model's tables; None: queries and keys are not rotated
    query_rotary: int | None = None  # the table of queries, where it is another one
    rotates_pairs: bool = False  # elements 2 * i and 2 * i + 1 turn by angle i; else i and i + half
    sliding_window: int | None = None  # tokens that a position sees, itself included; None: all before it
    chunk_size: int | None = None  # positions of a chunk, outside of which it sees nothing; None: there are no chunks
    scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # scaled scores s become soft_cap * tanh(s / soft_cap)
    has_bias: bool = False  # on q, k and v
    has_out_bias: bool = False
    head_norms: HeadNormKind | None = None  # of queries, and of keys
    has_norm_weights: bool = True  # these have weights
    qkv_clip: float | None = None  # bound of queries, keys and values, behind norms and before rotation
    has_value_norm: bool = False  # over each head of values, without weights
    has_keys_as_values: bool = False  # values are the keys' projection, without their norm and rotation
    shares_kv_of: int | None = None  # the layer whose keys and values these are; None: its own
    has_sinks: bool = False  # a logit per head joins its softmax, and has no value
    gate: GateKind | None = None  # the result is multiplied by the sigmoid of gates
    latent: LatentSpec | None = None  # None: a key and a value for each kv head are cached; else of one, of its size
    entry_kind: int = 0  # layers whose cached keys and values have other sizes have other numbers

    def __post_init__(self) -> None:
        has_weights_behind = self.head_norms == "each_behind" and self.has_norm_weights
        # The C++ kernels leave the first elements of pairs before the second ones.
        assert not (has_weights_behind and self.rotates_pairs), "weights of norms behind pairs are of other elements"

    @property
    def projects(self) -> Literal["qkv", "qk", "q"]:
        """What is projected of queries, keys and values."""
        return "q" if self.shares_kv_of is not None else "qk" if self.has_keys_as_values else "qkv"


class RecurrentSpec(msgspec.Struct, frozen=True, kw_only=True, metaclass=AbstractStructMeta):
    """A layer that keeps a state of fixed size instead of keys and values: of a convolution, and of the recurrence."""

    interval: int = 512  # tokens between the states that are kept for prefix hits

    @property
    @abstractmethod
    def max_shards(self) -> int:
        """How many ranks can have a part of it."""

    @property
    @abstractmethod
    def conv_shape(self) -> tuple[int, ...]:
        """Of the state of the convolution, in the model's dtype."""

    @property
    @abstractmethod
    def matrix_shape(self) -> tuple[int, ...] | None:
        """Of the state of the recurrence, in float32; None: there is none behind the convolution."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Elements of a token, in the model's dtype, from which both states can be computed again."""


class GatedDeltaSpec(RecurrentSpec, frozen=True, kw_only=True, tag="gated_delta"):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), behind a short convolution.

    Consecutive value heads share a key head.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int  # of a head of queries and keys
    value_size: int  # of a head of values
    conv_size: int  # tokens that the convolution sees, the last one included
    # Whether files hold the rows of the two projections key head by key head, or else kind by kind.
    has_rows_by_head: bool = False  # of queries, keys, values and the gate behind
    has_gates_by_head: bool = False  # of writing and forgetting

    @property
    def max_shards(self) -> int:
        return self.num_value_heads

    @property
    def has_heads_in_rounds(self) -> bool:
        """Whether value heads of a key head are not neighbors in GGUF files."""
        return self.num_value_heads != self.num_key_heads and not self.has_gates_by_head

    @property
    def num_channels(self) -> int:
        """What the convolution mixes: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def conv_shape(self) -> tuple[int, ...]:
        return self.conv_size - 1, self.num_channels

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def input_size(self) -> int:
        return self.num_channels + 2 * self.num_value_heads

    def with_heads(self, num_key_heads: int, num_value_heads: int) -> "GatedDeltaSpec":
        """Return the same with so many heads: those of a rank."""
        return msgspec.structs.replace(self, num_key_heads=num_key_heads, num_value_heads=num_value_heads)


class ShortConvSpec(RecurrentSpec, frozen=True, kw_only=True, tag="short_conv"):
    """A convolution between two gates, each channel for itself, and no recurrence (LFM2)."""

    num_channels: int
    conv_size: int  # tokens that the convolution sees, the last one included
    has_bias: bool = False  # on the convolution and the projections
    interval: int = 64  # a state takes no more than the keys and values of a few tokens

    @property
    def max_shards(self) -> int:
        return self.num_channels

    @property
    def conv_shape(self) -> tuple[int, ...]:
        return self.conv_size - 1, self.num_channels

    @property
    def matrix_shape(self) -> None:
        return None

    @property
    def input_size(self) -> int:
        return self.num_channels


class Mamba2Spec(RecurrentSpec, frozen=True, kw_only=True, tag="mamba2"):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a state space behind a short convolution, and a norm behind it.

    Consecutive heads are in a group, which has keys and queries for all of them.
    """

    num_groups: int
    num_heads: int
    state_size: int  # of a key or query
    head_dim: int  # of a head's values
    conv_size: int  # tokens that the convolution sees, the last one included
    has_bias: bool = False  # on the projection of inputs
    has_out_bias: bool = False
    has_conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, math.inf)  # how far a token steps, at least and at most
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"  # of each group; the gate is there in any case
    input_scales: tuple[float, ...] = (1.0,) * 5  # of projected gates, values, keys, queries and steps

    @property
    def max_shards(self) -> int:
        return self.num_heads

    @property
    def width(self) -> int:
        """The values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """What the convolution mixes: values of all heads, keys and queries of all groups."""
        return self.width + 2 * self.num_groups * self.state_size

    @property
    def conv_shape(self) -> tuple[int, ...]:
        return self.conv_size - 1, self.num_channels

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.state_size, self.head_dim

    @property
    def input_size(self) -> int:
        return self.num_channels + self.num_heads

    def with_heads(self, num_groups: int, num_heads: int) -> "Mamba2Spec":
        """Return the same with so many heads: those of a rank."""
        return msgspec.structs.replace(self, num_groups=num_groups, num_heads=num_heads)


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """An MLP that every token uses."""

    intermediate_size: int
    has_bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSpec:
    """How scores of experts become a token's choice, where that is not the largest logits by softmax.

    Groups: DeepSeek-AI 2024, arXiv:2405.04434; a correction, which balances load and is no part of the weights:
    arXiv:2408.15664.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # adjacent experts, equally many in each
    top_groups: int = 1  # experts are chosen in the best so many groups
    group_best: Literal[1, 2] = 1  # a group is as good as the sum of its best so many experts
    has_correction: bool = False  # a number for each expert is added to its score, for choosing only
    scale: float = 1.0  # of the weights
    epsilon: float = 0.0  # added to the sum by which weights are renormalized
    gates_shared: bool = True  # the shared expert's weight is the sigmoid of a logit; else 1

    @property
    def chooses_by_logit(self) -> bool:
        """Whether the largest logits are the best scores, and weights are shares of softmax."""
        return self.scores == "softmax" and self.num_groups == 1 and not self.has_correction and not self.epsilon


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538)."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of one expert
    shared_intermediate_size: int | None = None  # of the shared expert, which every token uses; None: there is none
    latent_size: int | None = None  # of what experts read and write, projected from and to tokens; None: tokens
    renormalizes: bool  # the weights of the chosen experts are normalized to sum to 1
    beside: DenseSpec | None = None  # an MLP whose output is added to theirs; None: there is none
    has_bias: bool = False  # on the linears of experts
    has_router_bias: bool = False  # on the logits, before experts are chosen
    swiglu_limit: float | None = None  # the clamped activation's; None: experts have the model's activation
    swiglu_alpha: float = 1.702  # of the clamped activation
    routing: RoutingSpec = RoutingSpec()


Mixer = AttentionSpec | GatedDeltaSpec | ShortConvSpec | Mamba2Spec
FeedForward = DenseSpec | ExpertsSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block: what mixes the tokens of a request, and what each token goes through alone. It may lack either."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    beside: Mixer | None = None  # reads what the mixer reads; both results are added
    mixer_scales: tuple[float, float] = (1.0, 1.0)  # with one beside: of both results

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What keeps something of a context, in the order of its caches."""
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), "the layer does not attend"
        return self.mixer

    def with_attention(self, **changes: object) -> "LayerSpec":
        """Return the layer with changed fields of its attention; one that does not attend stays as it is."""
        if not isinstance(self.mixer, AttentionSpec):
            return self
        return replace(self, mixer=msgspec.structs.replace(self.mixer, **changes))
