"""Takes images and videos out of chats, leaving marks that templates understand, and reads them.

Pictures and frames become patches; images may also be precomputed embeddings. A model gets a number of a video file's
frames that is given by rate or count, spread over the duration.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.config.json_fields import JsonFields
from octavo.config.model import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.image_processors import (
    ImageProcessor,
    Patches,
    checked_grids,
    frame_processor,
    image_processor,
    read_image_fields,
    read_video_fields,
)
from octavo.multimodal.pictures import MediaFile, PictureLimits, open_picture, read_source
from octavo.multimodal.placeholders import Embeddings, Medium
from octavo.multimodal.video_files import Frame, SampledFrames, read_video_file

if TYPE_CHECKING:
    from PIL.Image import Image


_MAX_FRAMES = 768
_VIDEO_LIMITS = PictureLimits(max_bytes=1 << 30)
DETAILS = (None, "auto", "low", "high", "original")  # only `low` changes a picture
_KINDS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}  # of parts, by their type
_IMAGE_OPTIONS, _VIDEO_OPTIONS = ("detail",), ("fps", "num_frames")
DEFAULT_FPS = 2.0  # of frames without a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An image or video of a request, not read yet."""

    name: str  # where in the request it is, for errors
    content: object  # an image as `open_picture` takes them; a video as a file, or its frames
    is_video: bool = False
    fps: object = None  # of the frames of a video, per second; of a file, how many are seen; None: by default
    num_frames: object = None  # of a file, how many are seen, in place of `fps`
    detail: object = None  # of an image: "low" makes it small


def has_images(messages: object) -> bool:
    """Return whether any message has an image or video. Malformed messages are rejected elsewhere."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return False
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return any(_kind(part) is not None for content in contents if isinstance(content, list) for part in content)


def take_images(messages: object) -> tuple[list[dict[str, object]], list[Source]]:
    """Return messages with `{"type": "image"}` or `{"type": "video"}` in place of these, and the sources, in order."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        limit = "a list of objects is expected, each with role and content"
        raise InvalidParameterError("messages", type(messages).__name__, limit)
    sources: list[Source] = []
    marked = [dict(message) for message in messages]
    for index, message in enumerate(marked):
        if isinstance(content := message.get("content"), list):
            parts = [_marked(part, f"messages[{index}].content[{at}]", sources) for at, part in enumerate(content)]
            message["content"] = parts
    return marked, sources


def _kind(part: object) -> str | None:
    return _KINDS.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def _marked(part: object, name: str, sources: list[Source]) -> object:
    kind = _kind(part)
    if kind is None:
        return part
    assert isinstance(part, Mapping)
    url = part.get(f"{kind}_url")
    options = {**part, **url} if isinstance(url, Mapping) else part  # of the URL in HTTP's parts, else beside it
    content = part.get(kind)
    if content is None:
        content = options.get("url") if isinstance(url, Mapping) else url
    if content is None:
        limit = f"content is expected under {kind!r} or '{kind}_url'"
        raise InvalidParameterError(name, sorted(map(str, part)), limit)
    chosen = {key: options.get(key) for key in (_VIDEO_OPTIONS if kind == "video" else _IMAGE_OPTIONS)}
    sources.append(Source(name=name, content=content, is_video=kind == "video", **chosen))
    return {"type": kind}


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSampling:
    """The settings in `video_preprocessor_config.json`, and the rule of the family."""

    fps: float  # frames per second of the video, unless a request says otherwise
    num_frames: int | None  # instead of `fps`
    min_frames: int
    max_frames: int
    multiple: int  # the number of frames is rounded down to one
    reaches_last: bool  # the last frame is sampled too (Qwen3-VL); else the first of each of equal parts (Qwen2-VL)

    @classmethod
    def read(cls, fields: JsonFields, vision: VisionConfig) -> Self:
        return cls(
            fps=fields.number("fps", 2.0),
            num_frames=fields.integer("num_frames") if "num_frames" in fields else None,
            min_frames=fields.integer("min_frames", 4),
            max_frames=fields.integer("max_frames", 768),
            multiple=1 if vision.has_frame_times else vision.temporal_patch_size,
            reaches_last=vision.has_frame_times,
        )

    def indices(self, total: int, rate: float, name: str, fps: float | None, num_frames: int | None) -> list[int]:
        """Return which of `total` frames, `rate` a second, are seen: `num_frames`, or `fps` a second, or by default."""
        asked = num_frames if num_frames is not None or fps is not None else self.num_frames
        if asked is None:
            by_rate = min(max(total / rate * (fps or self.fps), self.min_frames), self.max_frames, total)
            count = max(int(by_rate) // self.multiple * self.multiple, 1)
        else:
            count = round(asked / self.multiple) * self.multiple
        if not 0 < count <= min(total, self.max_frames):
            limit = f"1 to {min(total, self.max_frames)}: of {total} in the video, of {self.max_frames} for the model"
            raise InvalidParameterError(f"{name}.num_frames", count, limit)
        if self.reaches_last:
            spread: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
            return spread
        return [at * total // count for at in range(count)]


@dataclass(frozen=True, slots=True)
class Video:
    """A video as its tower reads it: as a whole, or in groups of frames, each with its timestamp."""

    parts: list[Patches]
    times_s: list[float] | None = None  # of each part; None: it is whole


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReader:
    """The settings of one checkpoint."""

    vision: VisionConfig
    images: ImageProcessor
    frames: ImageProcessor  # of videos
    sampling: FrameSampling
    max_tokens: int  # of a video that is whole

    @classmethod
    def of(cls, folder: Path, vision: VisionConfig, max_tokens: int) -> Self:
        """Read the settings of the checkpoint in `folder`; no image or video may have more than `max_tokens`."""
        takes_videos, images = vision.video_token_id is not None, image_processor(read_image_fields(folder), vision)
        fields = read_video_fields(folder) if takes_videos else JsonFields(str(folder), {})
        return cls(
            vision=vision,
            images=images,
            frames=frame_processor(fields, vision) if takes_videos else images,
            sampling=FrameSampling.read(fields, vision),
            max_tokens=max_tokens,
        )

    def image(self, source: Source) -> Medium:
        if isinstance(source.content, Mapping):
            return self._embeddings(source)
        return self.images.process([self.picture(source)], source.name)

    def picture(self, source: Source) -> "Image":
        if source.detail not in DETAILS:
            known = ", ".join(map(str, DETAILS))
            raise InvalidParameterError(f"{source.name}.detail", source.detail, f"one of {known} is expected")
        picture = open_picture(source.content, source.name, PictureLimits())
        if source.detail == "low":
            picture = picture.copy()
            picture.thumbnail((512, 512))
        return picture

    def _embeddings(self, source: Source) -> Embeddings:
        """Check precomputed embeddings, `{"image_embeds": [tokens, hidden size], "image_grid_thw": [3]}`."""
        given, fixed = source.content, self.vision.fixed_grid
        assert isinstance(given, Mapping)
        keys = {"image_embeds", "image_grid_thw"}
        if set(given) not in ([keys] if fixed is None else [keys, {"image_embeds"}]):
            limit = "image_embeds and image_grid_thw are expected"
            raise InvalidParameterError(source.name, sorted(map(str, given)), limit)
        [grid] = checked_grids([given.get("image_grid_thw", fixed)], self.vision)
        try:
            values: NDArray[Any] = np.asarray(given["image_embeds"])
        except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors on a GPU or in bfloat16
            values = np.empty(0, dtype=object)
        wanted = (self.vision.num_tokens(grid), self.vision.out_hidden_size)
        if values.shape != wanted or not np.issubdtype(values.dtype, np.floating) or not np.isfinite(values).all():
            what, limit = f"{values.dtype} {list(values.shape)}", f"finite floats {list(wanted)} by its grid"
            raise InvalidParameterError(f"{source.name}.image_embeds", what, limit)
        return Embeddings(values.astype(np.float32), grid)

    def video(self, source: Source) -> Video:
        """Return a video as the model takes it. Raises as `image`, or that the model takes none."""
        if self.vision.video_token_id is None:
            raise InvalidParameterError(source.name, "a video", "this model takes images only")
        sampled = self._frames_of(source)
        whole = self.frames.patches(sampled.frames)
        group = self.vision.temporal_patch_size
        if not self.vision.has_frame_times:
            rate = self.vision.tokens_per_second
            return Video([replace(whole, interval=1.0 if rate is None else rate * group / sampled.fps)])
        _, rows, columns = whole.grid
        parts = [replace(whole, values=part, grid=(1, rows, columns)) for part in np.split(whole.values, whole.grid[0])]
        times = [*sampled.times_s, *[sampled.times_s[-1]] * (-len(sampled.times_s) % group)]
        return Video(parts, [(times[at] + times[at + group - 1]) / 2 for at in range(0, len(times), group)])

    def _frames_of(self, source: Source) -> SampledFrames:
        content = source.content
        if isinstance(content, np.ndarray) and content.ndim == 4:
            content = list(content)
        if isinstance(content, (str, bytes, Path)):
            data = read_source(content, source.name, _VIDEO_LIMITS, "a file, a data: URL, bytes, or a list of frames")
            content = MediaFile(data=data, name=source.name, limits=_VIDEO_LIMITS)
        if isinstance(content, MediaFile):
            return self._from_file(content, source)
        if not isinstance(content, Sequence) or not 0 < len(content) <= _MAX_FRAMES:
            what = f"{len(content)} frames" if isinstance(content, list) else type(content).__name__
            limit = f"a file, or a list of 1 to {_MAX_FRAMES} frames, is expected"
            raise InvalidParameterError(source.name, what, limit)
        names = (f"{source.name}.frames[{at}]" for at in range(len(content)))
        pictures = [open_picture(each, name, _VIDEO_LIMITS) for each, name in zip(content, names, strict=True)]
        for at, picture in enumerate(pictures):
            if picture.size != pictures[0].size:
                limit = f"all frames must have the size of the first, {pictures[0].size}"
                raise InvalidParameterError(f"{source.name}.frames[{at}]", picture.size, limit)
        if source.num_frames is not None:
            limit = "frames are sampled from files only; send the frames themselves"
            raise InvalidParameterError(f"{source.name}.num_frames", source.num_frames, limit)
        fps = DEFAULT_FPS if source.fps is None else _checked_fps(source)
        frames = [self._resized(picture, len(pictures), source.name) for picture in pictures]
        return SampledFrames(frames=frames, times_s=[at / fps for at in range(len(pictures))], fps=fps)

    def _from_file(self, file: MediaFile, source: Source) -> SampledFrames:
        fps = None if source.fps is None else _checked_fps(source)
        count = source.num_frames
        if count is not None and (type(count) is not int or count < 1):
            raise InvalidParameterError(f"{source.name}.num_frames", count, "an integer of at least 1 is expected")
        if fps is not None and count is not None:
            raise InvalidParameterError(f"{source.name}.num_frames", count, "either fps or num_frames is expected")
        choose = partial(self.sampling.indices, name=source.name, fps=fps, num_frames=count)
        return read_video_file(file.data, source.name, file.limits, choose, partial(self._resized, name=source.name))

    def _resized(self, picture: "Image", num_frames: int, name: str) -> Frame:
        """Return a frame, one of so many, at the tower's size. Refuses what is too large before all are decoded."""
        frame = self.frames.resized(picture, name, num_frames)
        group = self.vision.temporal_patch_size
        if not self.vision.has_frame_times:  # else each group of frames is an image of its own
            sides = (side // self.vision.patch_size for side in frame.shape[:2])
            num_tokens = self.vision.num_tokens((math.ceil(num_frames / group), *sides))
            if num_tokens > self.max_tokens:
                limit = f"at most {self.max_tokens} (encoder_cache_tokens); send fewer frames"
                raise InvalidParameterError(name, f"{num_tokens} tokens", limit)
        return frame


def _checked_fps(source: Source) -> float:
    fps = source.fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise InvalidParameterError(f"{source.name}.fps", fps, "a finite number above 0 is expected")
    return float(fps)
