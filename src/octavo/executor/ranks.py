"""`Ranks`: the processes that run ranks, wherever they are, as seen by an executor."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

# Returns when the descriptor is readable; raises if there is nothing left to wait for.
Wait = Callable[[int], None]


class Ranks(Protocol):
    """Started ranks that have not received any message yet. The index is the rank number."""

    @property
    def replies(self) -> "Sequence[Connection[bytes, bytes]]":
        """One connection per rank; it closes when the rank dies."""
        ...

    def broadcast(self, message: bytes | bytearray, wait: Wait) -> None:
        """Send one message to every rank, in order."""
        ...

    def describe(self, rank: int) -> str:
        """Return a readable description of where a rank runs."""
        ...

    def how_it_ended(self, rank: int) -> str:
        """Return a readable description of how a rank ended whose connection has closed."""
        ...

    def kill(self) -> None:
        """Kill all remaining ranks immediately. Thread-safe and idempotent."""
        ...

    def join(self, timeout_s: float) -> None:
        """Close the connections, which makes ranks exit; kill those that do not; release all resources."""
        ...
