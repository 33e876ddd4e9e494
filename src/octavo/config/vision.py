"""The vision tower of a model that takes images, in numbers."""

import math
from dataclasses import dataclass
from typing import Literal

from octavo.errors import InvalidParameterError, UnsupportedModelError

VisionActivation = Literal["quick_gelu", "gelu_tanh", "silu"]
ClassToken = Literal["none", "internal", "output"]


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
