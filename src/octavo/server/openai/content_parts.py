"""Images and videos in the messages of a request: read from `data:` URLs, or fetched if the server allows it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from octavo.errors import InvalidParameterError
from octavo.inputs import TokensPrompt
from octavo.multimodal.media import DETAILS, VideoFile
from octavo.multimodal.pictures import PictureFile, PictureLimits, is_data_url, read_data_url
from octavo.multimodal.prompt import MultiModalPrompt
from octavo.server.args import ServerArgs
from octavo.server.errors import bad_request
from octavo.server.openai.params import truncated
from octavo.server.openai.protocol import ChatMessage, ContentPart, ImageUrl, VideoUrl
from octavo.server.remote_media import IMAGE_TYPES, VIDEO_TYPES, RemoteMedia

_KINDS = ("image_url", "video_url")
_REMOTE = ("http://", "https://")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaReader:
    """Reads the images and videos of requests for a model that takes them."""

    most: Mapping[str, int]  # parts of one request, by type
    images: PictureLimits
    videos: PictureLimits  # of a file, and of its frames
    remote_images: RemoteMedia | None  # None: only what is in the request itself
    remote_videos: RemoteMedia | None
    fetched: Mapping[str, bytes] = field(default_factory=dict)  # by place in the request; see `remote_parts`

    @classmethod
    def of(cls, args: ServerArgs) -> Self:
        """Return the reader that the server's options describe."""
        images = PictureLimits(max_bytes=args.max_image_bytes, max_pixels=args.max_image_pixels)
        videos = PictureLimits(max_bytes=args.max_video_bytes, max_pixels=args.max_image_pixels)
        remote_images, remote_videos = (
            RemoteMedia(timeout_s=args.media_timeout_s, max_bytes=limits.max_bytes, types=types)
            for limits, types in ((images, IMAGE_TYPES), (videos, VIDEO_TYPES))
        )
        return cls(
            most={"image_url": args.max_images, "video_url": args.max_videos},
            images=images,
            videos=videos,
            remote_images=remote_images if args.allow_remote_media else None,
            remote_videos=remote_videos if args.allow_remote_media else None,
        )

    def check_number(self, messages: Sequence[ChatMessage]) -> None:
        """Check how many images and videos a request has, before any of them is read.

        Raises:
            ApiError: 400; too many.
        """
        counts = Counter(part.type for message in messages for part in parts_of(message))
        for kind, most in self.most.items():
            if counts[kind] > most:
                names = kind.removesuffix("_url") + "s"
                raise bad_request(
                    f"{counts[kind]} {names}: at most {most} per request.", "messages", f"too_many_{names}"
                )

    def remote_parts(self, messages: Sequence[ChatMessage]) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield the place of each part that is elsewhere, and a call that fetches it: many may wait at once.

        Raises:
            ApiError: 400; too many parts.
        """
        self.check_number(messages)
        for at, message in enumerate(messages):
            for index, part in enumerate(parts_of(message)):
                remote = self.remote_videos if part.type == "video_url" else self.remote_images
                given = part.image_url if part.type == "image_url" else part.video_url
                url = given if given is None or isinstance(given, str) else given.url
                if is_media(part) and remote is not None and url is not None and url.startswith(_REMOTE):
                    path = f"messages[{at}].content[{index}].{part.type}"
                    yield path, partial(remote.fetch, url, path)

    def read(self, part: ContentPart, path: str) -> Mapping[str, object]:
        """Return a part with the file of its image or video, which is decoded later, one after the other.

        Raises:
            ApiError: 400; no URL, or an unknown level of detail.
            InvalidParameterError: it cannot be had, or not from there.
        """
        path = f"{path}.{part.type}"
        return self._image(part, path) if part.type == "image_url" else self._video(part, path)

    def _image(self, part: ContentPart, path: str) -> Mapping[str, object]:
        if part.image_url is None:
            raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
        given = ImageUrl(url=part.image_url) if isinstance(part.image_url, str) else part.image_url
        url, detail = given.url, given.detail
        if detail not in DETAILS:
            known = ", ".join(each for each in DETAILS if each is not None)
            raise bad_request(f"Unknown detail {detail!r}: one of {known}.", f"{path}.detail")
        data = self._bytes_at(url, path, self.images)
        return {"type": "image", "image": PictureFile(data=data, name=path, limits=self.images), "detail": detail}

    def _video(self, part: ContentPart, path: str) -> Mapping[str, object]:
        if part.video_url is None:
            raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
        given = VideoUrl(url=part.video_url) if isinstance(part.video_url, str) else part.video_url
        data = self._bytes_at(given.url, path, self.videos)
        file = VideoFile(data=data, limits=self.videos)
        return {"type": "video", "video": file, "fps": given.fps, "num_frames": given.num_frames}

    def _bytes_at(self, url: str, path: str, limits: PictureLimits) -> bytes:
        if path in self.fetched:
            return self.fetched[path]
        if is_data_url(url):
            return read_data_url(url, path, limits.max_bytes)
        if not url.startswith(_REMOTE):
            raise InvalidParameterError(path, url[:60], "a data: URL is expected, such as data:image/png;base64,...")
        limit = "this server reads nothing from elsewhere (--allow-remote-media); send a data: URL"
        raise InvalidParameterError(path, url[:60], limit)


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


def has_media(messages: Sequence[ChatMessage] | None) -> bool:
    """Return whether any message has an image or video: preparing it takes a while."""
    return any(is_media(part) for message in messages or () for part in parts_of(message))


def is_media(part: ContentPart) -> bool:
    return part.type in _KINDS


def parts_of(message: ChatMessage) -> Sequence[ContentPart]:
    """Return the parts of a message; none if its content is text."""
    return message.content if isinstance(message.content, list) else ()
