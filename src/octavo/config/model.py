"""The model's architecture in numbers, read once from `config.json`, the same for every checkpoint format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig
from octavo.contracts.kv_cache import KVGroup

DType = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["int8", "int4", "fp8", "gguf", "dequantize"]  # at load
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
    divisors: tuple[float, ...] = ()  # of the frequencies one by one, from a GGUF file, where no kind describes them
    sections: tuple[int, ...] = ()  # frequencies by time, height and width (arXiv:2409.12191); (): all by one
    is_interleaved: bool = False  # the axes take turns (Qwen3-VL, arXiv:2511.21631); else each has a run of frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Default sampling parameters from `generation_config.json` or a GGUF file; None if absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @property
    def names_sampling(self) -> bool:
        """Whether the checkpoint says anything about how to choose among tokens."""
        return any(each is not None for each in (self.temperature, self.top_p, self.top_k, self.min_p))


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Layers whose MLP is a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538)."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of one expert
    shared_intermediate_size: int | None = None  # of the shared expert, which every token uses; None: there is none
    renormalizes: bool  # the weights of the chosen experts are normalized to sum to 1
    is_sparse: tuple[bool, ...]  # per layer; False: a dense MLP of the model's intermediate_size


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """What attention caches per token if all heads share one vector (DeepSeek-AI 2024, arXiv:2405.04434)."""

    size: int  # elements of the vector
    value_size: int  # elements at its front that are the value; all are the key


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentConfig:
    """Layers that keep a state of fixed size instead of keys and values: of a convolution, and of the recurrence."""

    layers: tuple[int, ...]
    conv_shape: tuple[int, ...]  # in the model's dtype
    matrix_shape: tuple[int, ...]  # in float32
    interval: int = 512  # tokens between the states that are kept for prefix hits


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointQuantization:
    """Quantized weights, as described by `quantization_config`. The meaning of `values` depends on the method."""

    method: str  # quant_method, a known one
    origin: str  # of the values: a file and a key
    values: Mapping[str, Any]

    @property
    def fields(self) -> JsonFields:
        """Return the values, validated on access."""
        return JsonFields(self.origin, self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Counts are of the whole model, before sharding."""

    model: str  # as given by the user
    path: str  # local folder with config.json
    architecture: str  # e.g. Qwen3ForCausalLM
    dtype: DType  # of weights and activations, resolved
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    max_model_len: int  # prompt plus output of one request
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # of layers with a window; None: they rotate as all others do
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    logits_soft_cap: float | None = None  # logits l become logits_soft_cap * tanh(l / logits_soft_cap)
    sliding_windows: tuple[int | None, ...] = ()  # per layer; None: full attention
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    moe: MoEConfig | None = None  # None: no MoE layers
    quantization: CheckpointQuantization | None = None  # of the checkpoint's weights; None: dense
    latent: LatentConfig | None = None  # None: layers that attend keep a key and a value for each kv head
    recurrent: RecurrentConfig | None = None  # None: all layers attend
    vision: VisionConfig | None = None  # None: the model takes text only
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups: what layers keep of a context, by kind; the same on every rank.

        Recurrent ones are the last: attention backends plan for those before them.
        """
        groups = dict.fromkeys(map(self._kv_group, range(self.num_layers)))
        return tuple(sorted(groups, key=lambda group: group.kind == "recurrent"))

    def kv_group_of(self, layer: int) -> int:
        """Return the group of a layer, as an index into `kv_groups`."""
        return self.kv_groups.index(self._kv_group(layer))

    def _kv_group(self, layer: int) -> KVGroup:
        if self.recurrent is not None and layer in self.recurrent.layers:
            return KVGroup.recurrent(self.recurrent.interval)
        window = self.sliding_windows[layer] if self.sliding_windows else None
        return KVGroup(
            kind="attention" if self.latent is None else "latent",
            sliding_window=window if window and window < self.max_model_len else None,
        )
