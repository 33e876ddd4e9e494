"""Images and videos of requests: read from `data:` URLs, or fetched by URL if the server allows it.

Fetching is safe against server-side request forgery: a host is resolved once; all of its addresses must be public, and
the connection goes to one of them, so DNS rebinding has no effect. Redirects are checked again. Size, time and type are
limited.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self
from urllib.parse import quote, urljoin, urlsplit

from octavo.errors import InvalidParameterError
from octavo.multimodal.media import DETAILS
from octavo.multimodal.pictures import MediaFile, PictureLimits, is_data_url, read_data_url
from octavo.server.args import ServerArgs
from octavo.server.http.errors import bad_request
from octavo.server.openai.chat_prompt import is_media, parts_of
from octavo.server.openai.protocol import ChatMessage, ContentPart, ImageUrl, VideoUrl

_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
_SHOWN = 60  # characters of a URL in messages
_KEPT = "/%:@!$&'()*+,;=~?"  # of a URL: the rest of what is no ASCII letter, digit or mark is percent-encoded
_UNTOLD = ("application/octet-stream", "binary/octet-stream")
IMAGE_TYPES = ("image/", *_UNTOLD)  # beginnings of Content-Type
VIDEO_TYPES = ("video/", "image/", *_UNTOLD)  # animations are images

# Gateways translate these to IPv4 addresses of their choice: NAT64, 6to4, Teredo.
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))

_REMOTE = ("http://", "https://")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Return whether an address is one of the internet's hosts: not private, loopback, link-local, multicast, ..."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in _TRANSLATED):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteMedia:
    """Blocking: call it from a thread."""

    timeout_s: float  # for everything, redirects included
    max_bytes: int
    types: tuple[str, ...] = IMAGE_TYPES  # what may be there
    is_allowed: Callable[[Address], bool] = is_public

    def fetch(self, url: str, name: str) -> bytes:
        """Return the content at a URL. Raises InvalidParameterError: names the part of the request, and why not."""
        deadline_s, where = time.monotonic() + self.timeout_s, url
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                with self._opened(where, name, deadline_s) as response:
                    if response.status not in _REDIRECTS:
                        data = self._read(response, where, name)
                        _left(deadline_s)  # at the deadline, what came before it looks like all there is
                        return data
                    where = urljoin(where, response.headers.get("Location", ""))
        except InvalidParameterError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_late = time.monotonic() >= deadline_s
            why = f"not within {self.timeout_s:g} s" if is_late else str(error) or type(error).__name__
            raise _refusal(name, where, f"cannot be fetched: {why}") from error
        raise _refusal(name, url, f"more than {_MAX_REDIRECTS} redirects")

    @property
    def _accept(self) -> str:
        return ", ".join(f"{kind}*" for kind in self.types if kind.endswith("/"))

    @contextlib.contextmanager
    def _opened(self, url: str, name: str, deadline_s: float) -> Iterator[http.client.HTTPResponse]:
        """Connect to a checked address and send the request; yield the response, with its body unread."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
            raise _refusal(name, url, "http:// or https:// and a host are expected, without user and password")
        port = parts.port or _PORTS[parts.scheme]
        address = self._address_of(parts.hostname, port, name, url)
        connection = http.client.HTTPConnection(parts.hostname, port)
        with contextlib.closing(connection):
            connection.sock = socket.create_connection((str(address), port), timeout=_left(deadline_s))
            if parts.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(
                    connection.sock, server_hostname=parts.hostname, do_handshake_on_connect=False
                )
            with _ended_at(deadline_s, connection.sock):
                if isinstance(connection.sock, ssl.SSLSocket):
                    connection.sock.do_handshake()
                headers = {"Host": parts.netloc, "Accept": self._accept, "Accept-Encoding": "identity"}
                path, query = (quote(part, safe=_KEPT) for part in (parts.path or "/", parts.query))
                connection.request("GET", path + (f"?{query}" if query else ""), headers=headers)
                with contextlib.closing(connection.getresponse()) as response:  # it may be the socket's owner by now
                    yield response

    def _address_of(self, host: str, port: int, name: str, url: str) -> Address:
        """Resolve a host; every address that it has must be allowed."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]
        if not addresses or not all(map(self.is_allowed, addresses)):
            raise _refusal(name, url, "the host has no public address")
        return addresses[0]

    def _read(self, response: http.client.HTTPResponse, url: str, name: str) -> bytes:
        if response.status != http.client.OK:
            raise _refusal(name, url, f"its server answers {response.status}")
        kind = response.headers.get("Content-Type", "application/octet-stream")
        if not kind.lower().startswith(self.types):
            raise _refusal(name, url, f"{self._accept} is expected, its server sends {kind[:_SHOWN]}")
        if (response.length or 0) > self.max_bytes:
            raise _refusal(name, url, f"at most {self.max_bytes} bytes, its server sends {response.length}")
        body = bytearray()
        while piece := response.read1(_CHUNK_BYTES):
            body += piece
            if len(body) > self.max_bytes:
                raise _refusal(name, url, f"at most {self.max_bytes} bytes")
        if response.length:
            raise http.client.IncompleteRead(bytes(body), response.length)
        return bytes(body)


@dataclass(frozen=True, slots=True)
class MediaKind:
    """What applies to the images of a request, or to its videos and their frames."""

    most: int  # parts of one request
    limits: PictureLimits
    remote: RemoteMedia | None  # None: only what is in the request itself


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Reads the images and videos of requests for a model that takes them."""

    kinds: Mapping[str, MediaKind]  # by type of part
    fetched: Mapping[str, bytes] = field(default_factory=dict)  # by place in the request; see `remote_parts`

    @classmethod
    def of(cls, args: ServerArgs) -> Self:
        kinds = {}
        for name, most, max_bytes, types in (
            ("image_url", args.max_images, args.max_image_bytes, IMAGE_TYPES),
            ("video_url", args.max_videos, args.max_video_bytes, VIDEO_TYPES),
        ):
            limits = PictureLimits(max_bytes=max_bytes, max_pixels=args.max_image_pixels)
            remote = RemoteMedia(timeout_s=args.media_timeout_s, max_bytes=max_bytes, types=types)
            kinds[name] = MediaKind(most, limits, remote if args.allow_remote_media else None)
        return cls(kinds)

    def check_number(self, messages: Sequence[ChatMessage], root: str = "messages") -> None:
        """Check how many images and videos a request has, in its field `root`, before any of them is read."""
        counts = Counter(part.type for message in messages for part in parts_of(message))
        for name, kind in self.kinds.items():
            if counts[name] > kind.most:
                names = name.removesuffix("_url") + "s"
                text = f"{counts[name]} {names}: at most {kind.most} per request."
                raise bad_request(text, root, f"too_many_{names}")

    def remote_parts(
        self, messages: Sequence[ChatMessage], root: str = "messages"
    ) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield the place of each part that is elsewhere, and a call that fetches it: many may wait at once."""
        self.check_number(messages, root)
        for at, message in enumerate(messages):
            for index, part in enumerate(parts_of(message)):
                remote, given = self.kinds[part.type].remote if is_media(part) else None, _given(part)
                url = given if given is None or isinstance(given, str) else given.url
                if remote is not None and url is not None and url.startswith(_REMOTE):
                    path = f"{root}[{at}].content[{index}].{part.type}"
                    yield path, partial(remote.fetch, url, path)

    def read(self, part: ContentPart, path: str) -> Mapping[str, object]:
        """Return a part with the file of its image or video, which is decoded later, one after the other."""
        path, given, limits = f"{path}.{part.type}", _given(part), self.kinds[part.type].limits
        if given is None:
            raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
        if isinstance(given, str):
            given = ImageUrl(url=given) if part.type == "image_url" else VideoUrl(url=given)
        if isinstance(given, ImageUrl) and given.detail not in DETAILS:
            known = ", ".join(each for each in DETAILS if each is not None)
            raise bad_request(f"Unknown detail {given.detail!r}: one of {known}.", f"{path}.detail")
        file = MediaFile(data=self._bytes_at(given.url, path, limits), name=path, limits=limits)
        if isinstance(given, ImageUrl):
            return {"type": "image", "image": file, "detail": given.detail}
        return {"type": "video", "video": file, "fps": given.fps, "num_frames": given.num_frames}

    def _bytes_at(self, url: str, path: str, limits: PictureLimits) -> bytes:
        if path in self.fetched:
            return self.fetched[path]
        if is_data_url(url):
            return read_data_url(url, path, limits.max_bytes)
        limit = "a data: URL is expected, such as data:image/png;base64,..."
        if url.startswith(_REMOTE):
            limit = "this server reads nothing from elsewhere (--allow-remote-media); send a data: URL"
        raise _refusal(path, url, limit)


def _given(part: ContentPart) -> ImageUrl | VideoUrl | str | None:
    return part.image_url if part.type == "image_url" else part.video_url


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError("it took too long")
    return left_s


@contextlib.contextmanager
def _ended_at(deadline_s: float, connected: socket.socket) -> Iterator[None]:
    """End a connection at the deadline: a server that sends a byte now and then would pass every timeout of a read."""

    def end() -> None:
        with contextlib.suppress(OSError):  # closed in this moment
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(deadline_s), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refusal(name: str, url: str, limit: str) -> InvalidParameterError:
    return InvalidParameterError(name, url[:_SHOWN], limit)
