"""`Ranks`: several processes that run ranks, as an executor sees them, wherever they are."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

# Returns when the descriptor can be read; raises when there is nothing left to wait for.
Wait = Callable[[int], None]


class Ranks(Protocol):
    """Started, and not yet told anything. The rank's number is its index."""

    @property
    def replies(self) -> "Sequence[Connection[bytes, bytes]]":
        """One connection for each rank; it hangs up when the rank is gone."""
        ...

    def broadcast(self, message: bytes | bytearray, wait: Wait) -> None:
        """Send one message to every rank, in order."""
        ...

    def describe(self, rank: int) -> str:
        """Return where a rank is, for people."""
        ...

    def how_it_ended(self, rank: int) -> str:
        """Say in words how a rank that has hung up came to its end."""
        ...

    def kill(self) -> None:
        """End all that still run, at once. May be called by any thread, and twice."""
        ...

    def join(self, timeout_s: float) -> None:
        """Hang up, which ranks take for their end; kill those that do not; let go of everything they used."""
        ...
