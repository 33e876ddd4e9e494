"""Reads the images and videos of requests: pictures and frames to patches, or embeddings made elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.image_processors import read_frame_processor, read_image_processor
from octavo.multimodal.messages import Source
from octavo.multimodal.patches import ImageProcessor, Patches
from octavo.multimodal.pictures import PictureLimits, open_picture
from octavo.multimodal.placeholders import checked_grids
from octavo.multimodal.prompt import Embeddings, Medium

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_FRAMES = 768
_EMBEDDING_KEYS = {"image_embeds", "image_grid_thw"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReader:
    """The settings of one checkpoint, and limits."""

    vision: VisionConfig
    images: ImageProcessor
    videos: ImageProcessor
    limits: PictureLimits

    @classmethod
    def of(cls, folder: Path, vision: VisionConfig) -> Self:
        """Read the settings of the checkpoint in `folder`.

        Raises:
            CheckpointError, UnsupportedModelError: see `read_image_processor`.
        """
        images, videos = read_image_processor(folder, vision), read_frame_processor(folder, vision)
        return cls(vision=vision, images=images, videos=videos, limits=PictureLimits())

    def read(self, source: Source) -> Medium:
        """Return an image or video as the model takes it.

        Raises:
            InvalidParameterError: it cannot be read; names where in the request it is.
        """
        if source.is_video:
            return self._video(source)
        if isinstance(source.content, Mapping):
            return self._embeddings(source)
        return self.images.process([self.picture(source)], source.name)

    def picture(self, source: Source) -> "Image":
        """Return an image as RGB. Raises as `read`."""
        return open_picture(source.content, source.name, self.limits)

    def _video(self, source: Source) -> Patches:
        """Cut the frames of a video, all of the size of the first, in pairs."""
        frames = source.content
        if self.vision.video_token_id is None:
            raise InvalidParameterError(source.name, "a video", "this model takes images only")
        if self.vision.deepstack_layers:
            raise InvalidParameterError(source.name, "a video", "this model takes images only, so far")
        if isinstance(frames, np.ndarray) and frames.ndim == 4:
            frames = list(frames)
        if not isinstance(frames, Sequence) or isinstance(frames, (str, bytes)) or not 0 < len(frames) <= _MAX_FRAMES:
            what = f"{len(frames)} frames" if isinstance(frames, list) else type(frames).__name__
            raise InvalidParameterError(source.name, what, f"a list of 1 to {_MAX_FRAMES} frames is expected")
        pictures = [open_picture(frame, f"{source.name}.frames[{at}]", self.limits) for at, frame in enumerate(frames)]
        for at, picture in enumerate(pictures):
            if picture.size != pictures[0].size:
                limit = f"all frames must have the size of the first, {pictures[0].size}"
                raise InvalidParameterError(f"{source.name}.frames[{at}]", picture.size, limit)
        made = self.videos.process(pictures, source.name)
        return replace(made, interval=self._interval(source))

    def _interval(self, source: Source) -> float:
        """Return the rotary positions between pairs of frames."""
        fps = source.fps
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
            raise InvalidParameterError(f"{source.name}.fps", fps, "a finite number above 0 is expected")
        if self.vision.tokens_per_second is None:
            return 1.0
        return self.vision.tokens_per_second * self.vision.temporal_patch_size / fps

    def _embeddings(self, source: Source) -> Embeddings:
        """Check precomputed embeddings, `{"image_embeds": [tokens, hidden size], "image_grid_thw": [3]}`."""
        given = source.content
        assert isinstance(given, Mapping)
        fixed, keys = self.vision.fixed_grid, set(_EMBEDDING_KEYS)
        if set(given) not in ([keys] if fixed is None else [keys, {"image_embeds"}]):
            limit = "image_embeds and image_grid_thw are expected"
            raise InvalidParameterError(source.name, sorted(map(str, given)), limit)
        [grid] = checked_grids([given.get("image_grid_thw", fixed)], self.vision)
        values = np.asarray(given["image_embeds"])
        wanted = (self.vision.num_tokens(grid), self.vision.out_hidden_size)
        if values.shape != wanted or not np.issubdtype(values.dtype, np.floating) or not np.isfinite(values).all():
            what = f"{values.dtype} {list(values.shape)}"
            raise InvalidParameterError(
                f"{source.name}.image_embeds", what, f"finite floats {list(wanted)} by its grid"
            )
        return Embeddings(values.astype(np.float32), grid)
