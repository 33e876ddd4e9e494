"""Decodes pictures to plain RGB, applying their rotation, color mode and transparency; reads the `data:` URLs of media.

Pictures are untrusted. Their size is checked before they are decoded, only common formats are read, and damaged or
ambiguous ones are rejected with the reason. Pillow is imported for the first picture. URLs are read as browsers do,
since clients write them in many ways: the WHATWG's standards Fetch ("data: URL processor"), Infra ("forgiving-base64
decode") and URL.
"""

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import numpy as np

from octavo.errors import InvalidParameterError

if TYPE_CHECKING:
    from PIL.Image import Image


_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MANY_FRAMES = ("PNG", "WEBP", "GIF", "TIFF")  # a JPEG with several is one photograph in several versions
# Each pass over a progressive JPEG touches all pixels, however few bytes it has; encoders write about ten.
_START_OF_SCAN, _MAX_SCANS = b"\xff\xda", 100
_OUTER = "".join(map(chr, range(0x21)))  # control characters and the space, which a URL may have around it
_NO_LINE_BREAKS = {ord(each): None for each in "\t\n\r"}
_IS_BASE64 = re.compile(r"; *base64$", re.IGNORECASE)
_ALPHABET = re.compile(rb"[A-Za-z0-9+/]*")
_SHOWN = 60  # characters of a source in messages


def is_data_url(text: str) -> bool:
    """Return whether a text is a `data:` URL, in any case."""
    return text.lstrip(_OUTER)[:5].lower() == "data:"


def read_data_url(url: str, name: str, max_bytes: int) -> bytes:
    """Return the bytes of a `data:` URL, which are in base64 or percent-encoded; its media type is not needed."""
    head, comma, body = url.strip(_OUTER).partition(",")
    if not comma:
        raise InvalidParameterError(name, url[:_SHOWN], "a data URL is expected, such as data:image/png;base64,...")
    data = unquote_to_bytes(body.partition("#")[0].translate(_NO_LINE_BREAKS))
    is_base64 = _IS_BASE64.search(head.translate(_NO_LINE_BREAKS).strip(" \f"))
    if is_base64:
        data = data.translate(None, b"\t\n\f\r ")
        if len(data) % 4 == 0 and data.endswith(b"="):  # one or two = complete it
            data = data[:-2] + data[-2:].rstrip(b"=")
    num_bytes = len(data) * 3 // 4 if is_base64 else len(data)
    if num_bytes > max_bytes:
        raise InvalidParameterError(name, f"{num_bytes} bytes", f"at most {max_bytes} bytes")
    if not is_base64:
        return data
    if len(data) % 4 == 1 or not _ALPHABET.fullmatch(data):
        wrong = "characters of another code" if len(data) % 4 != 1 else f"{len(data)} characters"
        raise InvalidParameterError(name, url[:_SHOWN], f"not valid base64: {wrong}")
    return base64.b64decode(data + b"=" * (-len(data) % 4))  # bits beyond the last byte are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureLimits:
    """Limits that are checked before a picture is decoded."""

    max_bytes: int = 32 << 20
    max_pixels: int = 64_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaFile:
    """The contents of a picture's or video's file, with limits of their own: as a server gets them from strangers.

    It is decoded when its turn comes: a request may have many pictures, each of which takes a thousand times its size.
    """

    data: bytes
    name: str  # where in the request it is, for errors
    limits: PictureLimits


def open_picture(source: object, name: str, limits: PictureLimits) -> "Image":
    """Return a picture of any kind as RGB: a PIL image, an array [height, width, 3] uint8, a file, or a `data:` URL.

    A `MediaFile` is read under its own name and limits.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        # It may be a file that has not been decoded yet, or of a mode without a conversion.
        with decoding_errors(name, f"a PIL image of mode {source.mode}", "cannot be read"):
            return as_rgb(source, name, limits)
    if isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[2] not in (3, 4) or source.dtype != np.uint8 or 0 in source.shape:
            limit = "an array [height, width, 3 or 4] of uint8 is expected"
            raise InvalidParameterError(name, f"{source.dtype} {list(source.shape)}", limit)
        return as_rgb(Image.fromarray(source), name, limits)
    if isinstance(source, MediaFile):
        return decode_picture(source.data, source.name, source.limits)
    wanted = "a file, a data: URL, bytes, an array or a PIL image"
    if isinstance(source, (str, bytes, Path)):
        return decode_picture(read_source(source, name, limits, wanted), name, limits)
    raise InvalidParameterError(name, type(source).__name__, wanted)


def decode_picture(data: bytes, name: str, limits: PictureLimits) -> "Image":
    from PIL import Image, UnidentifiedImageError

    if len(data) > limits.max_bytes:
        raise InvalidParameterError(name, f"{len(data)} bytes", f"at most {limits.max_bytes} bytes")
    what = f"a file of {len(data)} bytes"
    with decoding_errors(name, what):
        try:
            with Image.open(BytesIO(data), formats=_FORMATS) as opened:
                check_size(opened.size, name, limits)
                # Not counted: a small file may have hundreds of thousands.
                if getattr(opened, "is_animated", False) and opened.format in _MANY_FRAMES:
                    limit = "a single picture is expected; send the frames of an animation as a video"
                    raise InvalidParameterError(name, f"{opened.format} with several frames", limit)
                if opened.format in ("JPEG", "MPO") and (num_scans := data.count(_START_OF_SCAN)) > _MAX_SCANS:
                    raise InvalidParameterError(name, f"JPEG of {num_scans} scans", f"at most {_MAX_SCANS} scans")
                opened.load()
                return as_rgb(opened, name, limits)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise InvalidParameterError(name, what, f"too many pixels, at most {limits.max_pixels}: {error}") from error
        except UnidentifiedImageError as error:
            known = ", ".join(_FORMATS)
            raise InvalidParameterError(name, what, f"not a picture in one of the formats {known}") from error


@contextmanager
def decoding_errors(name: str, what: str, why: str = "damaged") -> Iterator[None]:
    """Raise what decoders raise on damaged files, which may be anything, as an `InvalidParameterError`."""
    try:
        yield
    except InvalidParameterError:
        raise
    except Exception as error:
        raise InvalidParameterError(name, what, f"{why}: {error}") from error


def as_rgb(image: "Image", name: str, limits: PictureLimits) -> "Image":
    """Rotate as the EXIF data says, put transparent pictures on white, and convert to RGB."""
    from PIL import Image, ImageOps

    check_size(image.size, name, limits)
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise InvalidParameterError(name, "mode F", "pixels of floating-point numbers have no defined range")
    if image.mode.startswith("I"):  # 16 bits of gray, which `convert` would clip at 255
        gray = np.asarray(image).astype(np.uint32).clip(0, 65535)
        return Image.fromarray((gray // 257).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def check_size(size: tuple[int, int], name: str, limits: PictureLimits) -> None:
    width, height = size
    if not 0 < width * height <= limits.max_pixels:
        raise InvalidParameterError(name, f"{width} x {height} pixels", f"1 to {limits.max_pixels} pixels")


def read_source(source: str | bytes | Path, name: str, limits: PictureLimits, wanted: str) -> bytes:
    """Return the contents of a file: given, in a `data:` URL, or at a path. `wanted` is said of other URLs."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and is_data_url(source):
        return read_data_url(source, name, limits.max_bytes)
    if isinstance(source, str) and "://" in source and not source.startswith("file://"):
        raise InvalidParameterError(name, source[:_SHOWN], wanted)
    path = Path(str(source).removeprefix("file://"))
    try:
        num_bytes = path.stat().st_size
        if num_bytes > limits.max_bytes:
            raise InvalidParameterError(name, f"{num_bytes} bytes", f"at most {limits.max_bytes} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidParameterError(name, str(path), f"cannot be read: {error}") from error
