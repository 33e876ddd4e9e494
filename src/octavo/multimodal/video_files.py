"""Frames of video files: animated GIF, WebP and PNG by Pillow; MP4, MOV, WebM, Matroska and AVI by PyAV, if installed.

Videos are untrusted. The first bytes determine the format, so that FFmpeg does not try others, such as playlists that
refer to other files; sizes are checked before frames are decoded; only requested frames are converted to pictures, one
at a time, as all of them at their own size may exceed the memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import InvalidParameterError
from octavo.multimodal.pictures import PictureLimits, as_rgb, check_size, decoding_errors

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_ANIMATION = 20_000  # frames: each takes time, be it a single pixel
_SLOWEST_S = 0.01  # of an animation's frame without duration; browsers show such ones for 0.1 s
_DEFAULT_S = 0.1
_MAX_DECODED_PIXELS = 10**11  # frames up to the last wanted one: 13 minutes of 1080p at 60 frames a second

Choose = Callable[[int, float], list[int]]  # from the number of frames, and frames per second, to the wanted ones
Frame = NDArray[np.uint8]  # [height, width, 3]
Resize = Callable[["Image", int], Frame]  # an RGB picture, one of so many that are wanted, to its final size


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledFrames:
    """Some frames of a video."""

    frames: Sequence[Frame]  # of one size
    times_s: Sequence[float]  # when each is shown
    fps: float  # of these frames


def read_video_file(data: bytes, name: str, limits: PictureLimits, choose: Choose, resize: Resize) -> SampledFrames:
    """Decode the frames that `choose` selects, in ascending order, and resize each."""
    if len(data) > limits.max_bytes:
        raise InvalidParameterError(name, f"{len(data)} bytes", f"at most {limits.max_bytes} bytes")
    container = None  # FFmpeg's name of the format; None: Pillow may know it
    if data[4:8] == b"ftyp":
        container = "mp4"
    elif data[:4] == b"\x1a\x45\xdf\xa3":
        container = "matroska"
    elif data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        container = "avi"
    with decoding_errors(name, f"a file of {len(data)} bytes"):
        if container is None:
            return _by_pillow(data, name, limits, choose, resize)
        return _by_av(data, container, name, limits, choose, resize)


def _by_pillow(data: bytes, name: str, limits: PictureLimits, choose: Choose, resize: Resize) -> SampledFrames:
    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(BytesIO(data), formats=("GIF", "WEBP", "PNG"))
    except UnidentifiedImageError as error:
        known = "MP4, MOV, WebM, Matroska, AVI, or an animated GIF, WebP or PNG"
        raise InvalidParameterError(name, f"a file of {len(data)} bytes", f"a video is expected: {known}") from error
    with opened:
        total = int(getattr(opened, "n_frames", 1))
        if total > _MAX_ANIMATION:
            raise InvalidParameterError(name, f"an animation of {total} frames", f"at most {_MAX_ANIMATION} frames")
        _check_decoded(opened.size, total, name, limits)
        ends: list[float] = []
        for index in range(total):
            opened.seek(index)
            shown_s = opened.info.get("duration", 0) / 1000
            ends.append((ends[-1] if ends else 0.0) + (shown_s if shown_s >= _SLOWEST_S else _DEFAULT_S))
        rate = total / ends[-1]
        wanted = choose(total, rate)
        frames = []
        for index in wanted:
            opened.seek(index)
            frames.append(resize(as_rgb(opened.copy(), name, limits), len(wanted)))
    return _sampled(frames, wanted, total, rate)


def _by_av(
    data: bytes, container: str, name: str, limits: PictureLimits, choose: Choose, resize: Resize
) -> SampledFrames:
    try:
        import av
    except ImportError as error:
        limit = "reading it needs PyAV: pip install 'octavo[video]'; animated GIF, WebP and PNG need nothing"
        raise InvalidParameterError(name, f"a video ({container})", limit) from error
    with av.open(BytesIO(data), format=container) as opened:
        if not opened.streams.video:
            raise InvalidParameterError(name, f"{container} without pictures", "a video is expected")
        stream = opened.streams.video[0]
        _check_decoded((stream.width, stream.height), 1, name, limits)
        total = stream.frames or sum(packet.size > 0 for packet in opened.demux(stream))
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        if total < 1 or rate <= 0:
            raise InvalidParameterError(name, f"{total} frames, {rate:g} a second", "a video is expected")
        wanted = choose(total, rate)
        _check_decoded((stream.width, stream.height), wanted[-1] + 1, name, limits)
        opened.seek(0)
        frames = _decoded(opened.decode(stream), wanted, name, limits, resize)
    if len(frames) < len(wanted):
        limit = f"damaged: frame {wanted[len(frames)]} of {total} cannot be decoded"
        raise InvalidParameterError(name, f"a video ({container})", limit)
    return _sampled(frames, wanted, total, rate)


def _decoded(
    decoded: Iterator[Any], wanted: Sequence[int], name: str, limits: PictureLimits, resize: Resize
) -> list[Frame]:
    """Return the frames at `wanted` [.], ascending, turned as the file says."""
    frames: list[Frame] = []
    for index, frame in enumerate(decoded):
        while len(frames) < len(wanted) and wanted[len(frames)] == index:
            _check_decoded((frame.width, frame.height), 1, name, limits)  # streams may change it
            picture = frame.to_image()
            turned = picture.rotate(frame.rotation, expand=True) if frame.rotation else picture
            frames.append(resize(turned, len(wanted)))
        if len(frames) == len(wanted):
            break
    return frames


def _check_decoded(size: tuple[int, int], num_frames: int, name: str, limits: PictureLimits) -> None:
    """Check the size of frames, and of all that must be decoded. Raises InvalidParameterError: too large."""
    check_size(size, name, limits)
    num_pixels = size[0] * size[1]
    if num_pixels * num_frames > _MAX_DECODED_PIXELS:
        what = f"{num_frames} frames of {size[0]} x {size[1]} pixels"
        raise InvalidParameterError(name, what, f"too long: at most {_MAX_DECODED_PIXELS // num_pixels} such frames")


def _sampled(frames: Sequence[Frame], wanted: Sequence[int], total: int, rate: float) -> SampledFrames:
    times_s = [index / rate for index in wanted]
    return SampledFrames(frames=frames, times_s=times_s, fps=len(wanted) / total * rate)
