"""The architectures that Octavo serves, as facts about their `config.json`: what an absent key means, what is built in.

The same defaults as the reference implementations have, because checkpoints leave out what equals them. The code of an
architecture is in `models/`, under the same name.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

# llama: no window. mistral: one window for all layers. qwen: only with use_sliding_window, from max_window_layers on.
WindowRule = Literal["none", "all_layers", "upper_layers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureFacts:
    """How one architecture reads its configuration. None: the value follows from other keys."""

    model_type: str
    num_kv_heads: int | None = None  # where the key is absent; None: as many as query heads
    head_dim: int | None = None  # where the key is absent; None: hidden_size / num_attention_heads
    window_rule: WindowRule = "none"
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the key attention_bias decides, for q, k, v and the output projection alike
    has_mlp_bias_key: bool = False


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
    }
)
