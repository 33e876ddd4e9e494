"""Qwen2-VL (Wang et al. 2024, arXiv:2409.12191): Qwen2 with rotary positions of three axes, and a vision tower."""

from octavo.models.vision_language import VisionLanguageModel


class Qwen2VLForConditionalGeneration(VisionLanguageModel):
    """The decoder is Qwen2's, which is the family's own with biases."""
