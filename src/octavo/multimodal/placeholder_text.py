"""The text that stands for images and videos in prompts, expanded before tokenization.

Tokens on both sides depend on it: line breaks around an image, the times of a video's frames.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.videos import Video


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceholderTexts:
    """The tokens of `VisionConfig` as text; empty: the model has none."""

    image: str
    video: str
    start: str
    end: str
    around: str | None  # see `VisionConfig.text_around`
    has_frame_times: bool

    @classmethod
    def of(cls, vision: VisionConfig, token_text: Callable[[int], str]) -> Self:
        """Read the texts from the tokenizer."""

        def text_of(token_id: int | None) -> str:
            return "" if token_id is None else token_text(token_id)

        return cls(
            image=text_of(vision.image_token_id),
            video=text_of(vision.video_token_id),
            start=text_of(vision.vision_start_token_id),
            end=text_of(vision.vision_end_token_id),
            around=vision.text_around,
            has_frame_times=vision.has_frame_times,
        )


def with_placeholders(text: str, texts: PlaceholderTexts) -> str:
    """Return the text with a placeholder for each image, where templates write only the token that begins it."""
    if texts.around is None or texts.start + texts.image in text:  # written out by the caller
        return text
    return text.replace(texts.start, texts.around + texts.start + texts.image + texts.end + texts.around)


def with_frame_times(text: str, videos: Sequence[Video], texts: PlaceholderTexts) -> str:
    """Return the text with a placeholder for each group of frames, after its time, in place of each video.

    Raises:
        InvalidParameterError: there are not as many places as videos.
    """
    if not texts.has_frame_times or not videos:
        return text
    first, *others = text.split(texts.start + texts.video + texts.end)
    if len(others) != len(videos):
        limit = f"the prompt has placeholders for {len(others)}"
        raise InvalidParameterError("videos", f"{len(videos)} videos", limit)
    pieces = [first]
    for video, behind in zip(videos, others, strict=True):
        assert video.times_s is not None, "videos of this model are read with their times"
        pieces += [f"<{time_s:.1f} seconds>{texts.start}{texts.video}{texts.end}" for time_s in video.times_s]
        pieces.append(behind)
    return "".join(pieces)
