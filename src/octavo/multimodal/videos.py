"""Videos of requests: frames given by the caller, or sampled from files; cut into patches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.data_urls import is_data_url, read_data_url
from octavo.multimodal.messages import DEFAULT_FPS, Source
from octavo.multimodal.patches import ImageProcessor, Patches
from octavo.multimodal.pictures import PictureLimits, open_picture, read_file
from octavo.multimodal.sampling import FrameSampling
from octavo.multimodal.video_files import Frame, SampledFrames, read_video_file

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_FRAMES = 768
_SHOWN = 60  # characters of a source in messages


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFile:
    """A file's contents with their own limits, for servers, whose input is untrusted."""

    data: bytes
    limits: PictureLimits


@dataclass(frozen=True, slots=True)
class Video:
    """A video as its tower reads it: as a whole, or in groups of frames, each with its timestamp."""

    parts: list[Patches]
    times_s: list[float] | None = None  # of each part; None: it is whole


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoReader:
    """The settings of one checkpoint, and limits of files and frames."""

    vision: VisionConfig
    frames: ImageProcessor
    sampling: FrameSampling
    limits: PictureLimits
    max_tokens: int  # of a video that is whole

    def read(self, source: Source) -> Video:
        """Return the patches of a video.

        Raises:
            InvalidParameterError: it cannot be read, or is of a kind or size that the model does not take.
        """
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
            content = VideoFile(data=self._bytes_of(content, source.name), limits=self.limits)
        if isinstance(content, VideoFile):
            return self._from_file(content, source)
        if not isinstance(content, Sequence) or not 0 < len(content) <= _MAX_FRAMES:
            what = f"{len(content)} frames" if isinstance(content, list) else type(content).__name__
            raise InvalidParameterError(
                source.name, what, f"a file, or a list of 1 to {_MAX_FRAMES} frames, is expected"
            )
        return self._listed(content, source)

    def _listed(self, given: Sequence[object], source: Source) -> SampledFrames:
        pictures = [open_picture(frame, f"{source.name}.frames[{at}]", self.limits) for at, frame in enumerate(given)]
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

    def _from_file(self, file: VideoFile, source: Source) -> SampledFrames:
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

    def _bytes_of(self, content: str | bytes | Path, name: str) -> bytes:
        if isinstance(content, bytes):
            return content
        if isinstance(content, str) and is_data_url(content):
            return read_data_url(content, name, self.limits.max_bytes)
        if isinstance(content, str) and "://" in content and not content.startswith("file://"):
            raise InvalidParameterError(name, content[:_SHOWN], "a file, a data: URL, bytes, or a list of frames")
        return read_file(Path(str(content).removeprefix("file://")), name, self.limits)


def _checked_fps(source: Source) -> float:
    fps = source.fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise InvalidParameterError(f"{source.name}.fps", fps, "a finite number above 0 is expected")
    return float(fps)
