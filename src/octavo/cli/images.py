"""Image files as parts of a message, for a local model and for a server alike."""

import base64
import mimetypes
from pathlib import Path

from octavo.errors import InvalidParameterError


def image_part(path: Path) -> dict[str, object]:
    """Return the content part of an image file. Its contents are checked by the engine or the server.

    Raises:
        InvalidParameterError: it cannot be read.
    """
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidParameterError("image", str(path), f"cannot be read: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}
