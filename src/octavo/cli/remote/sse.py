"""Parser for server-sent events: bytes in, the `data` of complete events out.

Source: the WHATWG HTML standard, "Server-sent events". Lines that end in a lone carriage return, which it allows and
no server sends, are not split.
"""


class EventReader:
    """Parses one stream. The result does not depend on how the bytes are split into chunks."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events completed by this chunk; multiple data lines are joined with newlines."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
            elif not text and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
