"""Takes images and videos out of the messages of a chat, and leaves marks that chat templates understand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import InvalidParameterError

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
