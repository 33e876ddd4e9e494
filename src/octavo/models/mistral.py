"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with one sliding window for all layers, or none."""

from octavo.models.common import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: the window is a per-layer setting (`ModelConfig.sliding_windows`)."""
