"""Server-sent events, read: bytes as they come off the wire in, the `data` of complete events out.

Source: the WHATWG HTML standard, "Server-sent events". Lines that end in a lone carriage return, which it allows and
nobody sends, are not split.
"""


class EventReader:
    """Reads one stream. Any cut of the bytes into pieces gives the same events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes, several data lines joined by a line feed."""
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
