"""Reads the images and videos of requests: pictures and frames as patches, or precomputed embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.image_processors import frame_processor, read_image_processor, read_video_fields
from octavo.multimodal.messages import Source
from octavo.multimodal.patches import ImageProcessor
from octavo.multimodal.pictures import PictureLimits, open_picture
from octavo.multimodal.placeholders import checked_grids
from octavo.multimodal.prompt import Embeddings, Medium
from octavo.multimodal.sampling import FrameSampling
from octavo.multimodal.videos import Video, VideoReader

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_VIDEO_BYTES = 1 << 30
_LOW_DETAIL = 512  # pixels of the longer side
DETAILS = (None, "auto", "low", "high", "original")  # only `low` changes a picture
_EMBEDDING_KEYS = {"image_embeds", "image_grid_thw"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReader:
    """The settings of one checkpoint, and limits."""

    vision: VisionConfig
    images: ImageProcessor
    videos: VideoReader | None  # None: the model takes no videos
    limits: PictureLimits

    @classmethod
    def of(cls, folder: Path, vision: VisionConfig, max_tokens: int) -> Self:
        """Read the settings of the checkpoint in `folder`; no image or video may have more than `max_tokens`.

        Raises:
            CheckpointError, UnsupportedModelError: see `read_image_processor`.
        """
        videos = None if vision.video_token_id is None else _video_reader(folder, vision, max_tokens)
        return cls(vision=vision, images=read_image_processor(folder, vision), videos=videos, limits=PictureLimits())

    def video(self, source: Source) -> Video:
        """Return a video as the model takes it. Raises as `image`, or that the model takes none."""
        if self.videos is None:
            raise InvalidParameterError(source.name, "a video", "this model takes images only")
        return self.videos.read(source)

    def image(self, source: Source) -> Medium:
        """Return an image as the model takes it.

        Raises:
            InvalidParameterError: it cannot be read; names where in the request it is.
        """
        if isinstance(source.content, Mapping):
            return self._embeddings(source)
        return self.images.process([self.picture(source)], source.name)

    def picture(self, source: Source) -> "Image":
        """Return an image as RGB. Raises as `image`."""
        if source.detail not in DETAILS:
            known = ", ".join(map(str, DETAILS))
            raise InvalidParameterError(f"{source.name}.detail", source.detail, f"one of {known} is expected")
        picture = open_picture(source.content, source.name, self.limits)
        if source.detail == "low":
            picture = picture.copy()
            picture.thumbnail((_LOW_DETAIL, _LOW_DETAIL))
        return picture

    def _embeddings(self, source: Source) -> Embeddings:
        """Check precomputed embeddings, `{"image_embeds": [tokens, hidden size], "image_grid_thw": [3]}`."""
        given = source.content
        assert isinstance(given, Mapping)
        fixed, keys = self.vision.fixed_grid, set(_EMBEDDING_KEYS)
        if set(given) not in ([keys] if fixed is None else [keys, {"image_embeds"}]):
            limit = "image_embeds and image_grid_thw are expected"
            raise InvalidParameterError(source.name, sorted(map(str, given)), limit)
        [grid] = checked_grids([given.get("image_grid_thw", fixed)], self.vision)
        values = _as_array(given["image_embeds"])
        wanted = (self.vision.num_tokens(grid), self.vision.out_hidden_size)
        if values.shape != wanted or not np.issubdtype(values.dtype, np.floating) or not np.isfinite(values).all():
            what = f"{values.dtype} {list(values.shape)}"
            raise InvalidParameterError(
                f"{source.name}.image_embeds", what, f"finite floats {list(wanted)} by its grid"
            )
        return Embeddings(values.astype(np.float32), grid)


def _as_array(values: object) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors on a GPU or in bfloat16
        return np.empty(0, dtype=object)


def _video_reader(folder: Path, vision: VisionConfig, max_tokens: int) -> VideoReader:
    fields = read_video_fields(folder)
    return VideoReader(
        vision=vision,
        frames=frame_processor(fields, vision),
        sampling=FrameSampling.read(fields, vision),
        limits=PictureLimits(max_bytes=_MAX_VIDEO_BYTES),
        max_tokens=max_tokens,
    )
