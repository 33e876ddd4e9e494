"""Checks of engine options against a vision tower."""

from octavo.config.model import ModelConfig
from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError, UnsupportedModelError


def check_vision(model: ModelConfig, tensor_parallel_size: int) -> None:
    """Check a model with a vision tower; others have nothing to check.

    Raises:
        InvalidParameterError: more ranks than the tower has heads.
        UnsupportedModelError: placeholders are not in the vocabulary.
    """
    vision = model.vision
    if vision is None:
        return
    if tensor_parallel_size > vision.num_heads:
        limit = f"at most {vision.num_heads}: every rank needs an attention head of the vision tower"
        raise InvalidParameterError("tensor_parallel_size", tensor_parallel_size, limit)
    if max(vision.image_token_id, vision.video_token_id or 0) >= model.vocab_size:
        raise UnsupportedModelError(
            f"{model.path}: placeholders of images and videos are tokens {vision.image_token_id} and "
            f"{vision.video_token_id}, but the vocabulary has {model.vocab_size}"
        )


def largest_whole_span(vision: VisionConfig | None, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return how many tokens a step must compute together: those of an image, if they attend to each other; else 0.

    Raises:
        InvalidParameterError: a step has no room for them and one token of every other request, which would starve.
    """
    if vision is None or not vision.is_bidirectional:
        return 0
    assert vision.fixed_grid is not None, "these models have images of one size"
    num_tokens = vision.num_tokens(vision.fixed_grid)
    least = num_tokens + min(max_num_seqs, max_num_batched_tokens) - 1
    if max_num_batched_tokens < least:
        limit = f"at least {least}: an image's {num_tokens} tokens, and one of each other request (max_num_seqs)"
        raise InvalidParameterError("max_num_batched_tokens", max_num_batched_tokens, limit)
    return num_tokens
