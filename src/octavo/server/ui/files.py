"""The files of the page: read once, sent with a checksum as ETag."""

import hashlib
import html
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response

INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only what this server sends may run or load; images and videos of a conversation are in the page itself.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src data: blob:",
        "base-uri 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask each time: the answer is a 304 until the server is another version
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "StaticFile":
        return cls(content, _TYPES[PurePosixPath(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def response(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it."""
        headers = {**_HEADERS, "etag": self.etag}
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


@cache
def static_files() -> dict[str, StaticFile]:
    """Return all files by their name below `/ui/`."""
    return {
        name: StaticFile.of(name, found.read_bytes())
        for name, found in _below(files("octavo.server.ui") / "static")
        if PurePosixPath(name).suffix in _TYPES
    }


def _below(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for each in folder.iterdir():
        found += _below(each, f"{prefix}{each.name}/") if each.is_dir() else [(prefix + each.name, each)]
    return found


def index_page(root_path: str) -> StaticFile:
    """Return the page itself, whose addresses are relative to a proxy's prefix."""
    base = html.escape(f"{root_path}/") if root_path else "./"
    content = static_files()[INDEX].content.decode().replace('href="BASE"', f'href="{base}"')
    return StaticFile.of(INDEX, content.encode())


def public_paths() -> frozenset[str]:
    """Return the addresses that need no key: they contain nothing of the model or the settings."""
    return frozenset(f"/ui/{name}" for name in static_files())
