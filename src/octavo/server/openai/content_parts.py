"""Images in the messages of a request: read from `data:` URLs, or fetched if the server allows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from octavo.errors import InvalidParameterError
from octavo.inputs import TokensPrompt
from octavo.multimodal.pictures import PictureLimits, decode_picture, read_data_url
from octavo.multimodal.prompt import MultiModalPrompt
from octavo.server.args import ServerArgs
from octavo.server.errors import bad_request
from octavo.server.openai.params import truncated
from octavo.server.openai.protocol import ChatMessage, ContentPart, ImageUrl
from octavo.server.remote_media import RemoteMedia

if TYPE_CHECKING:
    from PIL.Image import Image

_LOW_DETAIL = 512  # pixels of the longer side
_DETAILS = ("auto", "low", "high")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageReader:
    """Reads the images of requests for a model that takes them."""

    max_images: int
    limits: PictureLimits
    remote: RemoteMedia | None  # None: only images in the request itself

    @classmethod
    def of(cls, args: ServerArgs) -> Self:
        """Return the reader that the server's options describe."""
        remote = RemoteMedia(timeout_s=args.media_timeout_s, max_bytes=args.max_image_bytes)
        return cls(
            max_images=args.max_images,
            limits=PictureLimits(max_bytes=args.max_image_bytes, max_pixels=args.max_image_pixels),
            remote=remote if args.allow_remote_media else None,
        )

    def check_number(self, messages: Sequence[ChatMessage]) -> None:
        """Check how many images a request has, before any of them is read.

        Raises:
            ApiError: 400; too many.
        """
        count = sum(is_image(part) for message in messages for part in parts_of(message))
        if count > self.max_images:
            raise bad_request(f"{count} images: at most {self.max_images} per request.", "messages", "too_many_images")

    def read(self, part: ContentPart, path: str) -> Mapping[str, object]:
        """Return a part with the image itself.

        Raises:
            ApiError: 400; no URL, or an unknown level of detail.
            InvalidParameterError: the image cannot be read, or not from there.
        """
        path = f"{path}.image_url"
        if part.image_url is None:
            raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
        given = ImageUrl(url=part.image_url) if isinstance(part.image_url, str) else part.image_url
        url, detail = given.url, given.detail
        if (detail or "auto") not in _DETAILS:
            raise bad_request(f"Unknown detail {detail!r}: one of {', '.join(_DETAILS)}.", f"{path}.detail")
        image = decode_picture(self._bytes_at(url, path), path, self.limits)
        return {"type": "image", "image": _reduced(image) if detail == "low" else image}

    def _bytes_at(self, url: str, path: str) -> bytes:
        if url.startswith("data:"):
            return read_data_url(url, path, self.limits)
        if not url.startswith(("http://", "https://")):
            raise InvalidParameterError(path, url[:60], "a data: URL is expected, such as data:image/png;base64,...")
        if self.remote is None:
            limit = "this server reads no images from elsewhere (--allow-remote-media); send a data: URL"
            raise InvalidParameterError(path, url[:60], limit)
        return self.remote.fetch(url, path)


def token_ids_of(prompt: TokensPrompt | MultiModalPrompt) -> list[int]:
    """Return a prompt's tokens, those of images included."""
    return prompt.token_ids if isinstance(prompt, MultiModalPrompt) else prompt["prompt_token_ids"]


def truncated_chat(prompt: TokensPrompt | MultiModalPrompt, max_tokens: int | None) -> TokensPrompt | MultiModalPrompt:
    """Return the last `max_tokens` tokens of a conversation; all if there is no limit.

    Raises:
        ApiError: 400; a limit below 1, or one on a prompt with images.
    """
    if not isinstance(prompt, MultiModalPrompt):
        return truncated(prompt, max_tokens)
    if max_tokens is not None:
        text = "Prompts with images cannot be truncated."
        raise bad_request(text, "truncate_prompt_tokens", "unsupported_parameter")
    return prompt


def has_images(messages: Sequence[ChatMessage] | None) -> bool:
    """Return whether any message has an image: preparing it takes a while."""
    return any(is_image(part) for message in messages or () for part in parts_of(message))


def is_image(part: ContentPart) -> bool:
    return part.type == "image_url"


def parts_of(message: ChatMessage) -> Sequence[ContentPart]:
    """Return the parts of a message; none if its content is text."""
    return message.content if isinstance(message.content, list) else ()


def _reduced(image: "Image") -> "Image":
    small = image.copy()
    small.thumbnail((_LOW_DETAIL, _LOW_DETAIL))
    return small
