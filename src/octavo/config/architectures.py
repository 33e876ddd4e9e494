"""Supported architectures as facts about their `config.json`: defaults of absent keys, and fixed properties.

The defaults equal those of the reference implementations, because checkpoints omit keys that have default values. The
code of each architecture is in `models/`, under the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

# llama: no window. mistral: one window for all layers. gemma3: for all but every sliding_window_pattern-th layer. The
# others only with use_sliding_window: qwen2 and qwen3 from max_window_layers on, qwen2_moe every other layer below it,
# qwen3_moe all layers.
WindowRule = Literal["none", "all_layers", "pattern", "upper_layers", "even_lower_layers", "all_layers_on_demand"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEFacts:
    """Defaults of absent keys in an architecture with MoE layers."""

    num_experts: int
    top_k: int
    intermediate_size: int | None = None  # under moe_intermediate_size; None: the model's intermediate_size
    shared_intermediate_size: int | None = None  # None: no shared expert
    always_renormalizes: bool = False  # otherwise norm_topk_prob decides
    has_dense_layers: bool = True  # as given by decoder_sparse_step and mlp_only_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureFacts:
    """How one architecture reads its configuration. None: derived from other keys."""

    model_type: str
    num_kv_heads: int | None = None  # default; None: as many as query heads
    head_dim: int | None = None  # default; None: hidden_size / num_attention_heads
    window_rule: WindowRule = "none"
    window: int | None = 4096  # default, if there is a window rule
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: attention_bias decides, for q, k, v and the output projection
    has_qkv_bias_key: bool = False  # the key qkv_bias decides for q, k and v; default true
    has_mlp_bias_key: bool = False
    rms_norm_eps: float = 1e-6  # default
    rope_theta: float = 10000.0  # default
    local_rope_theta: float | None = None  # default of layers with a window; None: they rotate as all others do
    activation: Literal["silu", "gelu_tanh"] = "silu"
    is_length_scaled: bool = False  # max_position_embeddings includes what rotary scaling adds
    has_attention_scale_key: bool = False  # the key query_pre_attn_scalar: scores are divided by its root
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that others require
    moe: MoEFacts | None = None
    has_rotary_axes: bool = False  # rotary positions count time, height and width
    rotary_sections: tuple[int, ...] = ()  # default: frequencies of each axis
    interleaves_axes: bool = False  # default: their frequencies take turns
    text: tuple[str, ...] = ()  # architectures that text_config may be of; (): of this one. Defaults are by model_type


_LLAMA_TEXT = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
)
_MISTRAL_TEXT = MappingProxyType({**_LLAMA_TEXT, "intermediate_size": 14336, "max_position_embeddings": 131072})
_QWEN2_TEXT = MappingProxyType(
    {**_LLAMA_TEXT, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
)
_GEMMA3 = ArchitectureFacts(
    model_type="gemma3_text",
    num_kv_heads=4,
    head_dim=256,
    window_rule="pattern",
    qk_norm=True,
    rope_theta=1e6,
    local_rope_theta=1e4,
    is_length_scaled=True,
    activation="gelu_tanh",
    has_attention_scale_key=True,
    defaults=MappingProxyType(
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
        }
    ),
)
_QWEN2_VL = ArchitectureFacts(
    model_type="qwen2_vl",
    num_kv_heads=8,
    window_rule="upper_layers",
    qkv_bias=True,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    defaults=MappingProxyType(
        {
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "max_position_embeddings": 32768,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        }
    ),
    has_rotary_axes=True,
    rotary_sections=(16, 24, 24),
)

ARCHITECTURES = MappingProxyType(
    {
        "LlamaForCausalLM": ArchitectureFacts(model_type="llama", has_mlp_bias_key=True),
        "MistralForCausalLM": ArchitectureFacts(
            model_type="mistral", num_kv_heads=8, window_rule="all_layers", qkv_bias=False
        ),
        "Qwen2ForCausalLM": ArchitectureFacts(
            model_type="qwen2", num_kv_heads=32, window_rule="upper_layers", qkv_bias=True
        ),
        "Qwen3ForCausalLM": ArchitectureFacts(
            model_type="qwen3", num_kv_heads=32, head_dim=128, window_rule="upper_layers", qk_norm=True
        ),
        "MixtralForCausalLM": ArchitectureFacts(
            model_type="mixtral",
            num_kv_heads=8,
            window_rule="all_layers",
            window=None,
            qkv_bias=False,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            moe=MoEFacts(num_experts=8, top_k=2, always_renormalizes=True, has_dense_layers=False),
        ),
        "Qwen2MoeForCausalLM": ArchitectureFacts(
            model_type="qwen2_moe",
            num_kv_heads=16,
            window_rule="even_lower_layers",
            has_qkv_bias_key=True,
            moe=MoEFacts(num_experts=60, top_k=4, intermediate_size=1408, shared_intermediate_size=5632),
        ),
        "Qwen3MoeForCausalLM": ArchitectureFacts(
            model_type="qwen3_moe",
            num_kv_heads=4,
            window_rule="all_layers_on_demand",
            qk_norm=True,
            moe=MoEFacts(num_experts=128, top_k=8, intermediate_size=768),
        ),
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": replace(_GEMMA3, model_type="gemma3"),
        "LlavaForConditionalGeneration": ArchitectureFacts(
            model_type="llava",
            text=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
            defaults=MappingProxyType({"llama": _LLAMA_TEXT, "mistral": _MISTRAL_TEXT, "qwen2": _QWEN2_TEXT}),
        ),
        "Qwen2VLForConditionalGeneration": _QWEN2_VL,
        "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2_VL, model_type="qwen2_5_vl"),
        "Qwen3VLForConditionalGeneration": ArchitectureFacts(
            model_type="qwen3_vl",
            num_kv_heads=32,
            head_dim=128,
            qk_norm=True,
            rope_theta=5e5,
            defaults=MappingProxyType({**_QWEN2_TEXT, "max_position_embeddings": 128000}),
            has_rotary_axes=True,
            rotary_sections=(24, 20, 20),
            interleaves_axes=True,
        ),
    }
)
