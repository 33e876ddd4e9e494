"""Llama 1 to 3.x (Touvron et al. 2023, arXiv:2302.13971): the plain member of the decoder family.

Biases (`attention_bias`, `mlp_bias`) and rotary scaling are settings.
"""

from octavo.models.common import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama: the family without changes."""
