"""Llama and its closest kin. Biases, windows and rotary scaling are settings of the family, not differences."""

from types import MappingProxyType

from octavo.models.common import DECODER_WEIGHT_NAMES
from octavo.models.interfaces import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama 1 to 3.x (Touvron et al. 2023, arXiv:2302.13971): the family without changes."""


class MistralForCausalLM(CausalLM):
    """Mistral (Jiang et al. 2023, arXiv:2310.06825): one sliding window for all layers, or none."""


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): biases on queries, keys and values only.

    With `use_sliding_window`, the layers from `max_window_layers` on have a window.
    """


class Qwen3ForCausalLM(CausalLM):
    """Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): QK norm, and two more norms in the checkpoint."""

    weight_names = MappingProxyType(
        {
            **DECODER_WEIGHT_NAMES,
            "model.layers.{layer}.self_attn.q_norm": "layers.{layer}.attention.head_norms:query",
            "model.layers.{layer}.self_attn.k_norm": "layers.{layer}.attention.head_norms:key",
        }
    )
