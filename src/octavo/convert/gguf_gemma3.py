"""Writes the settings that only GGUF files of Gemma 3 have; `config/gguf.py` reads them."""

import math
from typing import Any

from octavo.config.gguf import gemma3_attention_divisor
from octavo.config.model import ModelConfig
from octavo.errors import UnsupportedModelError


def write_gemma3_settings(writer: Any, model: ModelConfig) -> None:
    """Add windows, the rotary base of layers that have one, and the cap of logits.

    Raises:
        UnsupportedModelError: attention has a scale that readers of such files would not use.
    """
    divisor = gemma3_attention_divisor(model.num_layers, model.hidden_size, model.num_heads, model.head_dim)
    scale = model.attention_scale
    if scale is None or not math.isclose(scale, divisor**-0.5, rel_tol=1e-6):
        said = "none" if scale is None else f"{scale**-2:g}"
        limit = f"query_pre_attn_scalar is {said}; files do not say it, and readers take {divisor}"
        raise UnsupportedModelError(f"{model.model}: cannot be written as gguf: {limit}")
    windows = [window for window in model.sliding_windows if window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
        writer.add_sliding_window_pattern([window is not None for window in model.sliding_windows])
    if model.local_rope is not None:
        writer.add_rope_freq_base_swa(model.local_rope.theta)
    if model.logits_soft_cap is not None:
        writer.add_final_logit_softcapping(model.logits_soft_cap)
