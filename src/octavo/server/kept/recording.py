"""`Recording`: the events of one answer, kept while its readers come and go; `Reader`: the stream of one of them.

An event is counted within its choice, so that its number does not depend on how the choices of a request take turns.
The id of an event, `REPLY:3.2`, says how many events of each choice its reader has: it asks for the others with it.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from octavo.server.http.errors import ApiError, bad_request
from octavo.server.http.sse import FrameSource, OwnEnding

_END = b"\n\n"  # of an event; JSON contains no line break
_EVENT_BYTES = 150  # of an event's objects, beside its text


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The frame of event `number`, from 1, of a choice; the last index stands for what belongs to none of several."""

    choice: int
    number: int
    frame: bytes


class _Choice(msgspec.Struct):
    index: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Chunk).decode


class Recording:
    """Takes all that its source gives at once, whoever reads. Owned by one event loop.

    `on_growth` is called with the bytes that it needs more.
    """

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self.name: str | None = None  # of the reply, for the ids of its events; None: they have none
        self._on_growth = on_growth
        self._source: FrameSource | None = None
        self._counts: list[int] = []  # events of each choice, then those of none
        self._events: list[Event] = []
        self._num_dropped = 0  # events before the first one in the list
        self._readers: dict[Reader, Callable[[], None]] = {}
        self._is_held = True  # nothing is shown yet
        self.is_over = False
        self.is_evicted = False  # no more readers: what all present ones have read is dropped
        self.error: Exception | None = None  # how it ended, after its last event
        self._ending: bytes | None = None  # what readers are sent then; None: nobody has asked
        self.on_change: Callable[[], None] = lambda: None  # a reader has come or gone, or it is over

    @property
    def has_readers(self) -> bool:
        return bool(self._readers)

    @property
    def num_choices(self) -> int:
        return len(self._counts) - 1

    @property
    def num_bytes(self) -> int:
        return sum(len(event.frame) + _EVENT_BYTES for event in self._events)

    @property
    def events(self) -> list[Event]:
        """All of them; only while it is not evicted."""
        assert not self._num_dropped
        return self._events

    def start(self, source: FrameSource, num_choices: int) -> None:
        """Record what `source` gives, until it is over. Raises what its `start` raises."""
        self._source, self._counts = source, [0] * (num_choices + 1)
        source.start(self._on_update)

    def restore(self, events: Sequence[Event], num_choices: int) -> None:
        """Begin with all events of an answer that is over."""
        self._events, self._counts = list(events), [0] * (num_choices + 1)
        for event in events:
            self._counts[event.choice] = event.number
        self._is_held, self.is_over = False, True

    def put(self, body: bytes) -> None:
        """Record an answer that is no stream, as one event."""
        self._counts = [0, 0]
        self._add(0, body)
        self._end()

    def show(self) -> None:
        """Let readers see what there is, and what comes."""
        self._is_held = False
        self._notify()

    def fail(self, error: Exception) -> None:
        """End with an error, unless it is over."""
        if not self.is_over:
            self.error, self._is_held = error, False
            self._end()

    def ending(self, error: ApiError) -> bytes:
        """Return the end of a stream that has failed, the same for all readers; empty: as others of its route end."""
        if self._ending is None:
            source: object = self._source
            self._ending = source.ending(error) if isinstance(source, OwnEnding) else b""
        return self._ending

    def close(self) -> None:
        """Stop the source, finished or not."""
        if self._source is not None:
            self._source.close()

    def evict(self) -> None:
        self.is_evicted = True
        self._trim()

    def count_tokens(self) -> tuple[int, int]:
        return (0, 0) if self._source is None else self._source.count_tokens()

    def attach(self, reader: "Reader", notify: Callable[[], None]) -> None:
        self._readers[reader] = notify
        self.on_change()

    def detach(self, reader: "Reader") -> None:
        if self._readers.pop(reader, None) is not None:
            self._trim()
            self.on_change()

    def after(self, position: int) -> tuple[Sequence[Event], int]:
        """Return the events from `position` on that may be shown, and the position after them."""
        if self._is_held:
            return (), position
        assert position >= self._num_dropped
        return self._events[position - self._num_dropped :], self._num_dropped + len(self._events)

    @property
    def num_events(self) -> int:
        return self._num_dropped + len(self._events)

    def has_all(self, counts: Sequence[int]) -> bool:
        """Whether it is over, and a reader that has these events of each choice has all."""
        return self.is_over and self.error is None and self.padded(counts) == self._counts

    def padded(self, counts: Sequence[int]) -> list[int]:
        """Return a reader's counts with one for events of no choice. Raises ApiError, 400: they do not fit."""
        num_missing = len(self._counts) - len(counts)
        if num_missing not in (0, 1):
            raise bad_request(f"The event id counts the events of {len(counts)} choices, not of {self.num_choices}.",
                              "Last-Event-ID")  # fmt: skip
        padded = [*counts, *[0] * num_missing]
        if self.is_over and any(count > known for count, known in zip(padded, self._counts, strict=True)):
            raise bad_request("The stream does not have that many events.", "Last-Event-ID")
        return padded

    def _on_update(self) -> None:
        """Take what is new. Never raises, as the engine calls it."""
        assert self._source is not None
        if self.is_over:
            return
        try:
            data = self._source.take()
            for body in data.split(_END)[:-1]:
                self._add(self._choice_of(body), body + _END)
            is_over = self._source.is_over
        except Exception as error:  # noqa: BLE001 - readers raise it
            self.fail(error)
            return
        if is_over:
            self._end()
        elif data:
            self._notify()

    def _choice_of(self, frame: bytes) -> int:
        if self.num_choices == 1:
            return 0
        data = frame.removeprefix(b"data: ")
        choices = [] if data == b"[DONE]" else _decode(data).choices
        return choices[0].index if choices else self.num_choices

    def _add(self, choice: int, frame: bytes) -> None:
        self._counts[choice] += 1
        self._events.append(Event(choice, self._counts[choice], frame))
        if not self.is_evicted:
            self._on_growth(len(frame) + _EVENT_BYTES)

    def _end(self) -> None:
        self.is_over = True
        self._notify()
        self.on_change()

    def _notify(self) -> None:
        for notify in list(self._readers.values()):
            notify()
        self._trim()

    def _trim(self) -> None:
        if self.is_evicted:
            first = min((reader.position for reader in self._readers), default=self.num_events)
            del self._events[: first - self._num_dropped]
            self._num_dropped = first


class Reader:
    """One reader's stream, a `FrameSource`: the events after those that it has, with ids if the stream has a name."""

    def __init__(self, recording: Recording, counts: Sequence[int] | None = None) -> None:
        """`counts`: events that it has, of each choice; None: none of any."""
        self._recording, self._known = recording, counts
        self._counts: list[int] | None = None  # the same when the number of choices is known
        self._notify: Callable[[], None] = lambda: None
        self.position = 0  # in the recording

    def start(self, notify: Callable[[], None]) -> None:
        """Raises ApiError, 404: its memory was needed meanwhile."""
        if self._recording.is_evicted:
            raise not_kept(self._recording.name or "")
        self._notify = notify
        self._recording.attach(self, notify)

    def take(self) -> bytes:
        """Raises ApiError: the position does not exist; and what ended the recording, after its last event."""
        events, self.position = self._recording.after(self.position)
        frames = []
        for event in events:
            counts = self._counts_so_far()
            if event.number > counts[event.choice]:
                counts[event.choice] = event.number
                named = self._recording.name is not None
                frames.append(b"id: %b\n%b" % (self._id(counts), event.frame) if named else event.frame)
        if (error := self._recording.error) is not None:
            if not frames:
                raise error
            asyncio.get_running_loop().call_soon(self._notify)  # it is raised when they are taken
        return b"".join(frames)

    @property
    def is_over(self) -> bool:
        recording = self._recording
        return recording.is_over and recording.error is None and self.position == recording.num_events

    def count_tokens(self) -> tuple[int, int]:
        return self._recording.count_tokens()

    def ending(self, error: ApiError) -> bytes:
        """Return the end of the stream that fails; empty: it ends as others do."""
        return self._recording.ending(error)

    def close(self) -> None:
        self._recording.detach(self)

    def _counts_so_far(self) -> list[int]:
        if self._counts is None:
            known = [0] * self._recording.num_choices if self._known is None else self._known
            self._counts = self._recording.padded(known)
        return self._counts

    def _id(self, counts: Sequence[int]) -> bytes:
        shown = counts if counts[-1] else counts[:-1]
        return f"{self._recording.name}:{'.'.join(map(str, shown))}".encode()


def parse_event_id(text: str) -> tuple[str, list[int]]:
    """Return the stream's name and a reader's counts. Raises ApiError, 400: no stream of this server has such an id."""
    name, _, rest = text.rpartition(":")
    counts = rest.split(".")
    if not name or not all(count.isascii() and count.isdigit() and len(count) <= 9 for count in counts):
        shown = text if len(text) <= 100 else text[:100] + "..."
        raise bad_request(f"Last-Event-ID={shown!r}: not the id of an event of this server", "Last-Event-ID")
    return name, [int(count) for count in counts]


def not_kept(name: str) -> ApiError:
    """The error for a stream that is not here, or not for this client."""
    message = f"The stream {name!r} is not kept here: it never was, its time is over, or its memory was needed."
    return ApiError(404, message, code="stream_not_found", param="Last-Event-ID")
