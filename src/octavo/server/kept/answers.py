"""`KeptAnswers`: the answers whose clients may come back, bounded in time and memory. Owned by one event loop."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from secrets import token_hex

from octavo.metrics.collect import HttpMetrics
from octavo.server.http.errors import ApiError
from octavo.server.kept.journal import Answer, Entry
from octavo.server.kept.recording import Recording, not_kept
from octavo.server.openai.birth import Birth

_ANSWER_BYTES = 4096  # of an answer's objects, beside its events


@dataclass(slots=True, eq=False, kw_only=True)
class Kept:
    """One answer, computed once, for the client that began it and those that come back to it."""

    serial: str = field(default_factory=lambda: token_hex(8))  # in the journal
    owner: str  # digest of the client's API key; empty on a server without keys
    key: bytes | None  # digest of owner and Idempotency-Key; None: it came without one
    request: bytes  # digest of path and body
    keep_s: float  # how long it goes on without a reader, and is kept when it is over
    recording: Recording
    birth: Birth = field(default_factory=Birth)
    warnings: list[str] = field(default_factory=list)  # of its request
    num_bytes: int = 0
    is_left: bool = False  # to the server that comes after this one
    stop: Callable[[ApiError], None] | None = None  # ends its computing
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # what computes it in the background has concluded
    timer: asyncio.TimerHandle | None = None  # until it is dropped, when it is over


class KeptAnswers:
    """Finds answers by the name of a reply or the key of a request; drops those over time, or over memory.

    When memory is short, answers that are over go first, the oldest first; then the largest of those that run: they
    lose their memory and go on for the readers that they have.
    """

    def __init__(self, max_bytes: int, metrics: HttpMetrics) -> None:
        self._max_bytes, self._metrics = max_bytes, metrics
        self._by_name: dict[tuple[str, str], Kept] = {}
        self._by_key: dict[bytes, Kept] = {}
        self._running: dict[Kept, None] = {}
        self._over: dict[Kept, None] = {}  # the oldest first
        self.on_drop: Callable[[Kept], None] = lambda kept: None  # called when one that was over is no longer kept

    def begin(self, owner: str, key: bytes | None, request: bytes, keep_s: float) -> Kept:
        """Keep a new answer, under its key if it has one, which must be free."""
        recording = Recording(lambda num_bytes: self._grow(kept, num_bytes))
        kept = Kept(owner=owner, key=key, request=request, keep_s=keep_s, recording=recording)
        self._running[kept] = None
        if key is not None:
            assert key not in self._by_key
            self._by_key[key] = kept
        self._grow(kept, _ANSWER_BYTES)
        return kept

    def restore(self, entry: Entry, keep_s: float, answer: Answer | None = None) -> Kept:
        """Keep an answer from before the server was killed, which is over, or will be computed again."""
        kept = self.begin(entry.owner, entry.key, entry.request, keep_s)
        kept.serial, kept.birth = entry.serial, entry.birth
        if entry.name is not None:
            self.name(kept, entry.name)
        if answer is not None:
            kept.warnings = answer.warnings
            kept.recording.restore(answer.events, answer.num_choices)
            self.end(kept, is_answered=True)
            self._grow(kept, kept.recording.num_bytes)
        return kept

    def name(self, kept: Kept, name: str) -> None:
        """Let clients find it by the ids of its events. A later reply of the same name takes it over."""
        kept.recording.name = name
        self._by_name[kept.owner, name] = kept

    def find(self, key: bytes) -> Kept | None:
        """Return the answer to a key, running or over, if it is kept."""
        return self._by_key.get(key)

    def has_key(self, key: bytes) -> bool:
        """Whether a key has an answer, running or over."""
        return key in self._by_key

    def of_key(self, key: bytes, request: bytes) -> Kept | None:
        """Return the answer to a key. Raises ApiError: it belongs to another request, 422; it is not kept, 409."""
        kept = self._by_key.get(key)
        if kept is None:
            return None
        if kept.request != request:
            text = "This Idempotency-Key was used for another request: another body, or another route."
            raise ApiError(422, text, param="Idempotency-Key", code="idempotency_key_reused")
        if kept.recording.is_evicted:
            text = "The answer to this Idempotency-Key is still being computed, but has grown too large to be kept."
            raise ApiError(409, text, param="Idempotency-Key", code="answer_not_kept")
        return kept

    def of_name(self, owner: str, name: str) -> Kept:
        """Return the answer of this name. Raises ApiError, 404: it is not here, or not this client's."""
        kept = self._by_name.get((owner, name))
        if kept is None:
            raise not_kept(name)
        return kept

    def end(self, kept: Kept, *, is_answered: bool) -> None:
        """The answer is over: keep it for its time. One that has failed may be computed again under its key."""
        del self._running[kept]
        if kept.recording.is_evicted:
            self._forget(kept)
            return
        self._over[kept] = None
        if not is_answered:
            self._release_key(kept)
        kept.timer = asyncio.get_running_loop().call_later(kept.keep_s, self.drop, kept)

    def drop(self, kept: Kept) -> None:
        """Keep an answer no longer; present readers get the rest."""
        self._metrics.num_kept_bytes -= kept.num_bytes
        kept.num_bytes = 0
        kept.recording.evict()
        if kept.timer is not None:
            kept.timer.cancel()
        if kept.recording.name is not None and self._by_name.get((kept.owner, kept.recording.name)) is kept:
            del self._by_name[kept.owner, kept.recording.name]
        if kept in self._over:
            del self._over[kept]
            self._forget(kept)

    def _forget(self, kept: Kept) -> None:
        self._release_key(kept)
        self.on_drop(kept)

    def _release_key(self, kept: Kept) -> None:
        if kept.key is not None and self._by_key.get(kept.key) is kept:
            del self._by_key[kept.key]

    def _grow(self, kept: Kept, num_bytes: int) -> None:
        kept.num_bytes += num_bytes
        self._metrics.num_kept_bytes += num_bytes
        while self._metrics.num_kept_bytes > self._max_bytes:
            oldest = next(iter(self._over), None)
            self.drop(max(self._running, key=lambda each: each.num_bytes) if oldest is None else oldest)


def digest(*parts: bytes) -> bytes:
    """Return a digest of these parts that no other parts have."""
    whole = sha256()
    for part in parts:
        whole.update(b"%d " % len(part) + part)
    return whole.digest()
