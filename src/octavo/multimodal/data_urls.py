"""Reads `data:` URLs as browsers do, since clients write them in many ways.

Source: the WHATWG's standards Fetch ("data: URL processor"), Infra ("forgiving-base64 decode") and URL.
"""

import base64
import re
from urllib.parse import unquote_to_bytes

from octavo.errors import InvalidParameterError

_SCHEME = "data:"
_OUTER = "".join(map(chr, range(0x21)))  # control characters and the space, which a URL may have around it
_NO_LINE_BREAKS = {ord(each): None for each in "\t\n\r"}
_WHITESPACE = b"\t\n\f\r "
_IS_BASE64 = re.compile(r"; *base64$", re.IGNORECASE)
_ALPHABET = re.compile(rb"[A-Za-z0-9+/]*")
_SHOWN = 60  # characters of a URL in messages


def is_data_url(text: str) -> bool:
    """Return whether a text is a `data:` URL, in any case."""
    return text.lstrip(_OUTER)[: len(_SCHEME)].lower() == _SCHEME


def read_data_url(url: str, name: str, max_bytes: int) -> bytes:
    """Return the bytes of a `data:` URL, which are in base64 or percent-encoded; its media type is not needed.

    Raises:
        InvalidParameterError: it is malformed, not base64, or too large; names the part of the request `name`.
    """
    head, comma, body = url.strip(_OUTER).partition(",")
    if not comma:
        raise InvalidParameterError(name, url[:_SHOWN], "a data URL is expected, such as data:image/png;base64,...")
    data = unquote_to_bytes(body.partition("#")[0].translate(_NO_LINE_BREAKS))
    is_base64 = _IS_BASE64.search(head.translate(_NO_LINE_BREAKS).strip(" \f"))
    if is_base64:
        data = _without_padding(data.translate(None, _WHITESPACE))
    num_bytes = len(data) * 3 // 4 if is_base64 else len(data)
    if num_bytes > max_bytes:
        raise InvalidParameterError(name, f"{num_bytes} bytes", f"at most {max_bytes} bytes")
    if not is_base64:
        return data
    if len(data) % 4 == 1 or not _ALPHABET.fullmatch(data):
        wrong = "characters of another code" if len(data) % 4 != 1 else f"{len(data)} characters"
        raise InvalidParameterError(name, url[:_SHOWN], f"not valid base64: {wrong}")
    return base64.b64decode(data + b"=" * (-len(data) % 4))  # bits beyond the last byte are dropped


def _without_padding(data: bytes) -> bytes:
    """Return base64 without the one or two = that complete it, if it has them."""
    if len(data) % 4 == 0 and data.endswith(b"="):
        return data[:-2] + data[-2:].rstrip(b"=")
    return data
