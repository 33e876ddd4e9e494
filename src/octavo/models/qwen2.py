"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on queries, keys and values only.

With `use_sliding_window`, the layers from `max_window_layers` on have a window.
"""

from octavo.models.common import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2: biases and windows are per-layer settings (`ModelConfig.attention_bias`, `sliding_windows`)."""
