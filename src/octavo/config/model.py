"""The model's architecture in numbers, read once from `config.json`, the same for every checkpoint format."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo.config.json_fields import JsonFields
from octavo.config.layers import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    Mixer,
    RecurrentSpec,
    RotarySpec,
)
from octavo.contracts.kv_cache import KVGroup
from octavo.errors import InvalidParameterError, UnsupportedModelError

DType = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["int8", "int4", "fp8", "gguf", "dequantize"]  # at load
ActivationName = Literal["silu", "gelu_tanh", "relu2", "plain_gelu"]  # the last two without a gate
ModelImpl = Literal["octavo", "transformers"]
# Of a branch: before it, on both sides, after it; before both branches of a block, which read the same.
NormPlacement = Literal["before", "around", "after", "shared"]
NormKind = Literal["rms", "centered", "centered_with_bias"]  # the others are layer norms
MLPActivation = Literal["gelu", "gelu_tanh", "silu", "relu"]
PoolingKind = Literal["last", "mean", "cls"]  # of the hidden states of a prompt: the last, their mean, the first
PoolerName = Literal["auto", "last", "mean", "cls", "rerank"]
VisionActivation = Literal["quick_gelu", "gelu_tanh", "silu"]
ClassToken = Literal["none", "internal", "output"]

_NO_LIMIT = 1 << 16  # ranks


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


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Embeddings of a token that layers read beside the residual stream, one for each layer."""

    vocab_size: int
    size: int  # of the embedding for one layer


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseStep:
    """A linear that a pooled vector goes through."""

    name: str  # of its tensors in the checkpoint, without suffix
    folder: str = ""  # that has its weights, by this name; empty: they are with all others
    in_size: int
    out_size: int
    has_bias: bool = True
    activation: Literal["none", "tanh", "gelu"] = "none"  # behind it
    norm_name: str = ""  # of a layer norm behind that; empty: there is none
    norm_eps: float = 1e-5
    has_norm_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """What an encoder's layers do beside what their specs say.

    A layer's `sliding_window` reaches to both sides: a token sees those less than so many positions away.
    """

    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-12
    has_norm_bias: bool = True
    activation: MLPActivation = "gelu"
    is_gated: bool = False  # the MLP has a second projection, whose product with the activated first it takes
    num_token_types: int = 0  # of embeddings that say which text of a pair a token is in; 0: there are none
    has_positions: bool = False  # their embeddings are added to those of tokens
    num_positions: int = 0  # with those
    position_offset: int = 0  # rows in front of the table's first position
    has_embedding_norm: bool = True
    has_final_norm: bool = False
    has_first_norm: bool = True  # before the first layer's attention, where norms are before it


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingConfig:
    """How the hidden states of a prompt become one vector, or the score of a pair of texts."""

    kind: PoolingKind = "last"
    normalizes: bool = True  # to length 1
    dense: tuple[DenseStep, ...] = ()
    dimensions: tuple[int, ...] | None = None  # sizes that vectors may be cut to; (): any; None: none
    prompt: str = ""  # put before each text
    ranks: bool = False  # answers whether a document fits a query, by its next token
    label_token_ids: tuple[int, int] | None = None  # of `ranks`: yes and no; None: the tokens of these words
    num_scores: int = 0  # outputs of a classifier over the vector; 0: there is none
    is_stated: bool = False  # by files or an option; else anything goes


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
    impl: ModelImpl = "octavo"  # whose code computes it
    dtype: DType  # of weights and activations, resolved
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rotary: tuple[RotarySpec, ...]  # the tables that layers rotate by
    max_position_embeddings: int
    max_model_len: int  # prompt plus output of one request
    rms_norm_eps: float
    norm_offset: float = 0.0  # 1 if the checkpoint stores norm weights minus one
    post_norm_eps: float | None = None  # of norms behind branches; None: that of all others
    activation: ActivationName = "silu"  # of MLPs and experts
    norms: NormPlacement = "before"
    norm_kind: NormKind = "rms"
    embedding_scale: float | None = None  # on embeddings; None: 1
    rounds_embedding_scale: bool = False  # to the dtype, as in training
    residual_scale: float = 1.0  # on what a branch adds to the residual stream
    logits_scale: float = 1.0
    tie_word_embeddings: bool = False
    has_head: bool = True  # over the vocabulary; else it writes no text
    token_inputs: TokenInputs | None = None  # None: there are none
    logits_soft_cap: float | None = None  # logits l become logits_soft_cap * tanh(l / logits_soft_cap)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: CheckpointQuantization | None = None  # of the checkpoint's weights; None: dense
    vision: VisionConfig | None = None  # None: the model takes text only
    encoder: EncoderConfig | None = None  # None: a decoder
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    pooling: PoolingConfig = field(default_factory=PoolingConfig)

    @property
    def first_rotary_range(self) -> int:
        """Tokens of the longest request with LongRoPE's angles of short contexts, if there are longer ones; else 0."""
        ranges = [table.rope.original_max_position or 0 for table in self.rotary if table.rope.long_divisors]
        return next((tokens for tokens in ranges if tokens < self.max_model_len), 0)

    @property
    def vector_size(self) -> int:
        """Numbers of a pooled vector."""
        return self.pooling.dense[-1].out_size if self.pooling.dense else self.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def attention(self, layer: int) -> AttentionSpec:
        """Return the spec of a layer that attends."""
        return self.layers[layer].attention

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    def kept(self, layers: Iterable[int]) -> list[tuple[int, Mixer]]:
        """Return what has a cache of its own in these layers, with the layer, in the order of the caches."""
        return [(layer, mixer) for layer in layers for mixer in self.layers[layer].mixers]

    @property
    def attending(self) -> tuple[AttentionSpec, ...]:
        """The specs of all layers that attend."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that keep a state of fixed size."""
        states = (map(_keeps_state, layer.mixers) for layer in self.layers)
        return tuple(at for at, layer in enumerate(states) if any(layer))

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The tokens that a position sees in each layer; None: all, or a state of all."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer.sliding_window if isinstance(mixer, AttentionSpec) else None for mixer in mixers)

    @property
    def max_tensor_parallel_size(self) -> int:
        """Every rank needs a query head of each layer that attends, and a part of each that keeps a state."""
        states = (mixer for mixer in self.mixers if isinstance(mixer, RecurrentSpec))
        counts = [*(spec.num_heads for spec in self.attending), *(spec.max_shards for spec in states)]
        return min(counts, default=_NO_LIMIT)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The mixture of the first layer that has one; None: no layer has."""
        return next((each.feed_forward for each in self.layers if isinstance(each.feed_forward, ExpertsSpec)), None)

    @property
    def dense(self) -> DenseSpec | None:
        """The MLP of the first layer that has one; None: all layers have experts."""
        return next((each.feed_forward for each in self.layers if isinstance(each.feed_forward, DenseSpec)), None)

    def with_attention(self, **changes: object) -> "ModelConfig":
        """Return the model with changed fields in all layers that attend."""
        return replace(self, layers=tuple(layer.with_attention(**changes) for layer in self.layers))

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups: what layers keep of a context, by kind and size; the same on every rank.

        Recurrent ones are the last: attention backends plan for those before them.
        """
        if self.encoder is not None:
            return (KVGroup(),)  # of tokens that are computed, none of which is kept
        groups = dict.fromkeys(map(self._kv_group, self.mixers))
        return tuple(sorted(groups, key=lambda group: group.kind == "recurrent"))

    def kv_group_of(self, layer: int) -> int:
        """Return the group of a layer's mixer, as an index into `kv_groups`."""
        mixer = self.layers[layer].mixer
        assert mixer is not None, f"layer {layer} keeps nothing"
        return self.kv_group_of_mixer(mixer)

    def kv_group_of_mixer(self, mixer: Mixer) -> int:
        """Return the group of what a mixer keeps."""
        return 0 if self.encoder is not None else self.kv_groups.index(self._kv_group(mixer))

    def _kv_group(self, mixer: Mixer) -> KVGroup:
        if isinstance(mixer, RecurrentSpec):
            return KVGroup.recurrent(mixer.interval)
        window = mixer.sliding_window
        return KVGroup(
            kind="attention" if mixer.latent is None else "latent",
            sliding_window=window if window and window < self.max_model_len else None,
            entry_kind=mixer.entry_kind,
        )


def _keeps_state(mixer: Mixer) -> bool:
    return isinstance(mixer, RecurrentSpec)
