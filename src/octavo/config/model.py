"""The model's architecture in numbers, read once from `config.json`, the same for every checkpoint format."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.config.json_fields import JsonFields
from octavo.contracts.kv_cache import KVGroup
from octavo.errors import InvalidParameterError, UnsupportedModelError

DType = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["int8", "int4", "fp8", "gguf", "dequantize"]  # at load
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
VisionActivation = Literal["quick_gelu", "gelu_tanh", "silu"]
ClassToken = Literal["none", "internal", "output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """A vision transformer over patches, and how a prompt says where its output goes.

    An image is cut into patches of `patch_size` x `patch_size` pixels, a video into groups (`temporal_patch_size`) of
    them. Each `spatial_merge_size` x `spatial_merge_size` square of patches becomes one token of the prompt. Prompts
    have `image_token_id` or `video_token_id` in their place, between `vision_start_token_id` and `vision_end_token_id`
    if the model has these.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int  # of the language model
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    activation: VisionActivation
    norm_eps: float = 1e-6
    image_size: int | None = None  # pixels of a side of every image; None: images keep their proportions
    rope_theta: float = 10000.0  # of towers that rotate
    window_size: int | None = None  # pixels; None: every layer sees the whole image
    full_layers: tuple[int, ...] = ()  # with windows: the layers that see the whole image
    position_grid: int | None = None  # side of the square of learned position embeddings; None: there are none
    deepstack_layers: tuple[int, ...] = ()  # whose output is also added after the first decoder layers
    class_token: ClassToken = "none"  # before the patches; what comes of it is dropped or kept
    feature_depths: tuple[int, ...] = ()  # numbers of blocks after which the output is read; (): all
    projector_has_bias: bool = True
    has_rotary_axes: bool = False  # the decoder's rotary positions count time, height and width
    is_bidirectional: bool = False  # in the decoder, an image's tokens attend to each other
    has_frame_times: bool = False  # videos are single groups of frames, each behind its time as text
    tokens_per_second: float | None = None  # of temporal rotary positions; None: one position a pair of frames
    image_token_id: int
    video_token_id: int | None = None  # None: the model takes no videos
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    # Text on both sides of an image, in whose place prompts have the start token alone; None: they have placeholders.
    text_around: str | None = None

    @property
    def merge_unit(self) -> int:
        """Patches of one token."""
        return self.spatial_merge_size**2

    @property
    def patch_values(self) -> int:
        """Numbers in one patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def num_outputs(self) -> int:
        """Vectors of the language model's size that the tower returns for each token."""
        return 1 + len(self.deepstack_layers)

    @property
    def fixed_grid(self) -> tuple[int, int, int] | None:
        """The grid of every image; None: images keep their proportions."""
        if self.image_size is None:
            return None
        side = self.image_size // self.patch_size
        return 1, side, side

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the tokens of an image or video by its (groups of) frames, rows and columns of patches."""
        return math.prod(grid) // self.merge_unit + (self.class_token == "output")

    def check_fits(self, model_path: str, vocab_size: int, tensor_parallel_size: int) -> None:
        """Check the tower against its language model's vocabulary, and that each rank gets a head of it.

        Raises InvalidParameterError, UnsupportedModelError: names the number and its limit.
        """
        if tensor_parallel_size > self.num_heads:
            limit = f"at most {self.num_heads}: every rank needs an attention head of the vision tower"
            raise InvalidParameterError("tensor_parallel_size", tensor_parallel_size, limit)
        if max(self.image_token_id, self.video_token_id or 0) >= vocab_size:
            raise UnsupportedModelError(
                f"{model_path}: placeholders of images and videos are tokens {self.image_token_id} and "
                f"{self.video_token_id}, but the vocabulary has {vocab_size}"
            )

    def largest_whole_span(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return how many tokens a step must compute together: those of an image, if they attend to each other; else 0.

        Raises InvalidParameterError if a step has no room for them and one token of every other request.
        """
        if not self.is_bidirectional:
            return 0
        assert self.fixed_grid is not None, "these models have images of one size"
        num_tokens = self.num_tokens(self.fixed_grid)
        least = num_tokens + min(max_num_seqs, max_num_batched_tokens) - 1
        if max_num_batched_tokens < least:
            limit = f"at least {least}: an image's {num_tokens} tokens, and one of each other request (max_num_seqs)"
            raise InvalidParameterError("max_num_batched_tokens", max_num_batched_tokens, limit)
        return num_tokens


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
