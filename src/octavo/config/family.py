"""What Octavo knows of a family of models without torch: `Family`, one for each architecture, and tables they share.

The instances are in `config/families/`. Defaults of absent keys equal those of the reference implementations, because
checkpoints omit keys that have default values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from octavo.config.json_fields import JsonFields
from octavo.config.layers import HeadNormKind, LayerSpec, RotarySpec
from octavo.config.model import ActivationName, EncoderConfig, NormKind, NormPlacement, PoolingConfig, VisionConfig

# all_layers_on_demand, upper_layers (from max_window_layers on) and even_lower_layers (every other one below it): only
# with use_sliding_window. pattern: all but every sliding_window_pattern-th layer.
WindowRule = Literal["none", "all_layers", "pattern", "upper_layers", "even_lower_layers", "all_layers_on_demand"]
# Names in a checkpoint, and the places in the model that their tensors have: see `models/interfaces.py` `CausalLM`.
NameTable = Mapping[str, str]
Layers = tuple[tuple[LayerSpec, ...], tuple[RotarySpec, ...]]  # and the tables that they rotate by

DECODER_NAMES: NameTable = MappingProxyType(
    {
        "model.embed_tokens": "embedding",
        "model.layers.{layer}.input_layernorm": "layers.{layer}.attention_norm",
        "model.layers.{layer}.self_attn.q_proj": "layers.{layer}.attention.qkv:q",
        "model.layers.{layer}.self_attn.k_proj": "layers.{layer}.attention.qkv:k",
        "model.layers.{layer}.self_attn.v_proj": "layers.{layer}.attention.qkv:v",
        "model.layers.{layer}.self_attn.o_proj": "layers.{layer}.attention.out",
        "model.layers.{layer}.post_attention_layernorm": "layers.{layer}.mlp_norm",
        "model.layers.{layer}.mlp.gate_proj": "layers.{layer}.mlp.gate_up:gate",
        "model.layers.{layer}.mlp.up_proj": "layers.{layer}.mlp.gate_up:up",
        "model.layers.{layer}.mlp.down_proj": "layers.{layer}.mlp.down",
        "model.norm": "norm",
        "lm_head": "logits_head",
    }
)
HEAD_NORM_NAMES: NameTable = MappingProxyType(
    {
        "model.layers.{layer}.self_attn.q_norm": "layers.{layer}.attention.head_norms:query",
        "model.layers.{layer}.self_attn.k_norm": "layers.{layer}.attention.head_norms:key",
    }
)
POST_NORM_NAMES: NameTable = MappingProxyType(
    {
        "model.layers.{layer}.post_attention_layernorm": "layers.{layer}.post_attention_norm",
        "model.layers.{layer}.post_feedforward_layernorm": "layers.{layer}.post_mlp_norm",
    }
)
GGUF_POST_NORM_NAMES: NameTable = MappingProxyType(  # parts of a block in GGUF files
    {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
)
SANDWICH_NORM_NAMES: NameTable = MappingProxyType(
    {
        "model.layers.{layer}.post_attention_layernorm": "layers.{layer}.post_attention_norm",
        "model.layers.{layer}.pre_feedforward_layernorm": "layers.{layer}.mlp_norm",
        "model.layers.{layer}.post_feedforward_layernorm": "layers.{layer}.post_mlp_norm",
    }
)


def expert_names(
    router: str,
    expert: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    place: str = "layers.{layer}.mlp",
) -> NameTable:
    """Return the names of a mixture of experts at `place`; `expert` is the prefix of one, with {layer} and {expert}."""
    return {
        router: f"{place}.router:experts",
        f"{expert}.{gate}": f"{place}.experts.{{expert}}.gate_up:gate",
        f"{expert}.{up}": f"{place}.experts.{{expert}}.gate_up:up",
        f"{expert}.{down}": f"{place}.experts.{{expert}}.down",
    }


def stacked_experts(
    expert: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    stack: str = "model.layers.{layer}.mlp.experts",
) -> Mapping[str, tuple[str, ...]]:
    """Return the names of all experts in one tensor, as transformers 5 saves them, for `Family.other_spellings`."""
    return {
        f"{stack}.gate_up_proj": (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
        f"{stack}.down_proj": (f"{expert}.{down}.weight",),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEFacts:
    """Defaults of absent keys in an architecture with MoE layers."""

    num_experts: int
    top_k: int
    intermediate_size: int | None = None  # under moe_intermediate_size; None: the model's intermediate_size
    shared_intermediate_size: int | None = None  # None: no shared expert
    always_renormalizes: bool = False  # otherwise norm_topk_prob decides
    has_dense_layers: bool = True  # as given by decoder_sparse_step and mlp_only_layers


class GgufKeys(JsonFields):
    """The architecture's own keys in a GGUF file, without prefix, and the shapes of its tensors by name."""

    def __init__(self, origin: str, values: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(origin, values)
        self.tensors = tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFacts:
    """What llama.cpp's converter makes of a family."""

    architecture: str  # general.architecture
    other_architectures: tuple[str, ...] = ()  # that it may have, too
    # Whether it is this family, by the architecture's own keys (without prefix), where several have the name.
    fits: Callable[[GgufKeys], bool] = lambda keys: True
    # Names of tensors, or of a block's parts, where they differ from the usual ones: see `gguf/names.py`.
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    # Settings of `config.json` that it has beside the usual ones, or has otherwise: from its own keys (without
    # prefix), and the settings so far.
    settings: Callable[[GgufKeys, Mapping[str, Any]], Mapping[str, Any]] = lambda keys, so_far: {}
    inner_ends: tuple[str, ...] = ()  # tokens inside an answer, although a file may say that they end turns
    # Its keys that only `settings` reads, of those that mean the same for all others.
    own_keys: frozenset[str] = frozenset()
    stored_norms: frozenset[str] = frozenset()  # parts whose norms files have as checkpoints do, despite `norm_offset`
    interleaves_rows: bool = False  # of queries and keys, for rotation of adjacent pairs
    is_written: bool = False  # by `octavo convert`
    is_converted: bool = True  # to other formats; else checkpoints hold the weights in another layout than files

    @property
    def architectures(self) -> tuple[str, ...]:
        """All names that such files may have."""
        return self.architecture, *self.other_architectures


# Parts of a block in GGUF files that only the layer of an MTP head has.
NEXTN_NAMES: NameTable = MappingProxyType(
    {
        **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
    }
)
# A head that predicts a further token, as a layer behind the last one: of DeepSeek's, and in all GGUF files.
MTP_BEHIND: Mapping[str, Any] = MappingProxyType(
    {
        "layer": "model.layers.{behind}",
        "names": {
            "model.layers.{behind}.eh_proj": "projection",
            "model.layers.{behind}.enorm": "embedding_norm",
            "model.layers.{behind}.hnorm": "hidden_norm",
            "model.layers.{behind}.shared_head.norm": "norm",
            "model.layers.{behind}.embed_tokens": "embedding",
            "model.layers.{behind}.shared_head.head": "logits_head",
        },
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpFacts:
    """What checkpoints call the tensors of an MTP head: {behind} is its number behind the layers, {number} its own."""

    layer: str  # prefix of those of its decoder layer, which are called as in the model
    names: NameTable  # of the others, to their places in `models/mtp.py` `MtpHead`


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture: how it reads its configuration, what its tensors are called, which class computes it.

    None as a default: derived from other keys.
    """

    name: str  # among the architectures of `config.json`
    model_type: str
    model: str = "octavo.models.interfaces:CausalLM"  # module and class
    # From the keys of `config.json` and max_position_embeddings; None: `config/hf_layers.py` `read_layers` by the facts
    # below.
    read_layers: "Callable[[JsonFields, Family, int], Layers] | None" = None
    is_nested: bool = False  # the language model's keys are under text_config, as with `read_tower`
    leaves_out_further_layers: bool = False  # behind the last: heads that predict further tokens
    left_out: tuple[str, ...] = ()  # prefixes of tensors that are not loaded: of towers that Octavo does not compute
    read_tower: Callable[[JsonFields, int], VisionConfig] | None = None  # from its keys and the decoder's hidden size
    weight_names: NameTable = field(default_factory=lambda: DECODER_NAMES)
    # Alternative full names of checkpoint tensors: to the full names in the table whose rows [N, K] they concatenate;
    # with "{expert}" in those, it is a stack [experts, N, K].
    other_spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf: GgufFacts | None = None
    # That vectors may be cut to, of checkpoints with files about pooling: (): any; None: they were not trained so.
    vector_sizes: tuple[int, ...] | None = None
    read_encoder: Callable[[JsonFields], EncoderConfig] | None = None  # of a model whose tokens see both sides
    read_classifier: Callable[[JsonFields], PoolingConfig] | None = None  # of one that ends in one
    position_offset: int = 0  # of max_position_embeddings, those that no token has
    causal: str | None = None  # the family of checkpoints of this name that do not say use_bidirectional_attention
    # Keys under which some checkpoints have settings: to the usual ones, which they take the place of.
    usual_keys: NameTable = field(default_factory=dict)
    mtp: MtpFacts | None = None  # None: checkpoints have no MTP head, or Octavo does not compute it

    num_kv_heads: int | None = None  # default; None: as many as query heads
    head_dim: int | None = None  # default; None: hidden_size / num_attention_heads
    window_rule: WindowRule = "none"
    window: int | None = 4096  # default, if there is a window rule
    head_norms: HeadNormKind | None = None
    rotates_pairs: bool = False  # adjacent elements of heads, in checkpoints and GGUF files alike
    qkv_bias: bool | None = None  # None: attention_bias decides, for q, k, v and the output projection
    has_qkv_bias_key: bool = False  # the key qkv_bias decides for q, k and v; default true
    has_mlp_bias_key: bool = False
    out_bias_key: str | None = None  # the key that decides for the output projection
    has_out_bias: bool = True  # attention_bias means this too
    rms_norm_eps: float = 1e-6  # default
    post_norm_eps_key: str | None = None  # of norms behind branches, where theirs is another; it must be there
    norms: NormPlacement = "before"
    parallel_key: str | None = None  # the key that says whether both branches of a block share a norm
    norm_kind: NormKind = "rms"
    norm_offset: float = 0.0  # 1 if checkpoints store norm weights minus one
    rope_theta: float = 10000.0  # default
    local_rope_theta: float | None = None  # default of layers with a window; None: they rotate as all others do
    activation: ActivationName = "silu"  # of MLPs and experts
    has_token_inputs: bool = False  # each layer reads its own embedding of a token: hidden_size_per_layer_input
    is_length_scaled: bool = False  # max_position_embeddings includes what rotary scaling adds
    has_partial_rotary: bool = False  # the key partial_rotary_factor: only the front of each head is rotated
    has_attention_scale_key: bool = False  # the key query_pre_attn_scalar: scores are divided by its root
    has_score_cap_key: bool = False  # the key attn_logit_softcapping
    scales_embedding: bool = False  # by the root of the hidden size
    logits_factor_key: str | None = None  # the key by whose number logits are multiplied; it must be there
    has_head_bias: bool = False  # of the logits
    has_multipliers: bool = False  # the keys embedding_multiplier, residual_multiplier, logits_scaling ...
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that others require
    moe: MoEFacts | None = None
    has_rotary_axes: bool = False  # rotary positions count time, height and width
    rotary_sections: tuple[int, ...] = ()  # default: frequencies of each axis
    interleaves_axes: bool = False  # default: their frequencies take turns
    text: tuple[str, ...] = ()  # architectures that text_config may be of; (): of this one. Defaults are by model_type
