"""Images in decisions over HTTP: parts of a conversation's messages, and assets of a state by their placeholders."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.multimodal.pictures import MediaFile, read_data_url
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.openai.media import MediaReader
from octavo.server.openai.protocol import ChatMessage, ContentPart, ImageUrl

MAX_ASSETS = 4
_IMAGES = ("input_image", "image_url")
_OF_ASSET = frozenset({"type", "format", "data_base64"})


def pictures_of(item: Mapping[str, Any]) -> ChatMessage:
    """Return an item's images as a message of a chat, each at its index: what reads and fetches them takes these."""
    content = item.get("content")
    parts = content if isinstance(content, list) and item.get("type", "message") == "message" else []
    shown = [_image_part(part) or ContentPart(type="text", text="") for part in parts]
    return ChatMessage(role="user", content=shown)


def seen_content(
    content: str | list[Any], place: str, media: MediaReader | None, text_of: Callable[[Any, str], str]
) -> object:
    """Return the content of a message: a text, or where it has images a list of parts as in chats.

    `text_of` makes one text of parts. Raises ApiError: the model takes text only, or an image cannot be read.
    """
    parts = [] if isinstance(content, str) else [_image_part(part) for part in content]
    if not any(parts):
        return text_of(content, place)
    found: list[dict[str, Any]] = []
    for index, (part, given) in enumerate(zip(parts, content, strict=True)):
        at = f"{place}[{index}]"
        if part is None:
            text = text_of([given], place)
            if found and found[-1]["type"] == "text":
                found[-1]["text"] += f"\n{text}"
            else:
                found.append({"type": "text", "text": text})
        elif media is None:
            text = f"This model accepts only text, not {given['type']!r}."
            raise bad_request(text, f"{at}.type", "unsupported_content")
        else:
            found.append(dict(media.read(part, at)))
    return found


def read_assets(assets: Mapping[str, Any], media: MediaReader | None) -> dict[str, object]:
    """Return the images of a state by their placeholders. Raises ApiError: what is not one, or a model for text."""
    if len(assets) > MAX_ASSETS:
        raise bad_request(f"{len(assets)} assets: at most {MAX_ASSETS} per request.", "assets")
    if assets and media is None:
        raise bad_request("This model accepts only text, no images.", "assets", "unsupported_content")
    return {name: _asset(asset, f"assets.{name}", media) for name, asset in assets.items() if media is not None}


def _asset(asset: Any, place: str, media: MediaReader) -> MediaFile:
    is_image = isinstance(asset, Mapping) and asset.get("type") == "image" and asset.keys() == _OF_ASSET
    if not is_image or not all(isinstance(value, str) for value in asset.values()):
        text = f'\'{place}\': {{"type": "image", "format": "png", "data_base64": "..."}} is expected.'
        raise bad_request(text, place)
    limits, name = media.kinds["image_url"].limits, f"{place}.data_base64"
    data = read_data_url(f"data:image/{asset['format']};base64,{asset['data_base64']}", name, limits.max_bytes)
    return MediaFile(data=data, name=name, limits=limits)


def _image_part(part: Any) -> ContentPart | None:
    """Return an image of a conversation as a part of a chat; None: it is none."""
    if not isinstance(part, Mapping) or part.get("type") not in _IMAGES:
        return None
    given = part.get("image_url")
    if isinstance(given, str):
        return ContentPart(type="image_url", image_url=ImageUrl(url=given, detail=part.get("detail")))
    try:
        return ContentPart(type="image_url", image_url=msgspec.convert(given, ImageUrl | None))
    except msgspec.ValidationError as error:
        raise ApiError(400, f"'image_url': {error}", param="input") from error
