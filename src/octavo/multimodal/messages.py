"""Images in the messages of a chat: found, taken out, and left as marks that chat templates understand."""

from collections.abc import Mapping, Sequence

from octavo.errors import InvalidParameterError
from octavo.multimodal.pictures import image_source

_IMAGE_PARTS = frozenset({"image", "image_url"})

Messages = Sequence[Mapping[str, object]]


def has_images(messages: object) -> bool:
    """Return whether any message has a part that is an image. Malformed messages have none: others complain."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return False
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return any(_is_image(part) for content in contents if isinstance(content, list) for part in content)


def take_images(messages: Messages) -> tuple[list[dict[str, object]], list[tuple[str, object]]]:
    """Return the messages with `{"type": "image"}` in place of images, and the images' names and sources, in order.

    Raises:
        InvalidParameterError: an image part without an image.
    """
    images: list[tuple[str, object]] = []
    marked = [dict(message) for message in messages]
    for index, message in enumerate(marked):
        if isinstance(content := message.get("content"), list):
            parts = [_marked(part, f"messages[{index}].content[{at}]", images) for at, part in enumerate(content)]
            message["content"] = parts
    return marked, images


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS


def _marked(part: object, name: str, images: list[tuple[str, object]]) -> object:
    if not _is_image(part):
        return part
    assert isinstance(part, Mapping)
    source = image_source(part)
    if source is None:
        raise InvalidParameterError(name, sorted(map(str, part)), "an image is expected under 'image' or 'image_url'")
    images.append((name, source))
    return {"type": "image"}
