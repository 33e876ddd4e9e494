"""`Ranks`: the processes that run ranks, wherever they are; how an executor receives from them and notices a death."""

import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from octavo.errors import EngineDeadError

logger = logging.getLogger(__name__)

_VERDICT_S = 10.0  # the connection has closed; the cause is known within milliseconds

# Returns when the descriptor is readable; raises if there is nothing left to wait for.
Wait = Callable[[int], object]


class Ranks(Protocol):
    """Started ranks that have not received any message yet. The index is the rank number."""

    @property
    def replies(self) -> "Sequence[Connection[bytes, bytes]]":
        """One connection per rank; it closes when the rank dies."""

    def broadcast(self, message: bytes | bytearray, wait: Wait) -> None:
        """Send one message to every rank, in order."""

    def describe(self, rank: int) -> str:
        """Return a readable description of where a rank runs."""

    def how_it_ended(self, rank: int) -> str:
        """Return a readable description of how a rank ended whose connection has closed."""

    def kill(self) -> None:
        """Kill all remaining ranks immediately. Thread-safe and idempotent."""

    def join(self, timeout_s: float) -> None:
        """Close the connections, which makes ranks exit; kill those that do not; release all resources."""


class RankWatch:
    """Receives from ranks, on one thread, and notices the first that dies.

    A thread sleeps until then and kills the others, which might wait in a collective forever.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._by_fd = {connection.fileno(): rank for rank, connection in enumerate(ranks.replies)}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        self.death: EngineDeadError | None = None  # which rank died and how; None while all are alive
        self._is_over = threading.Event()
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="octavo-death-watch", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float | None, extra_fd: int | None = None) -> list[tuple[int, bytes]]:
        """Return (rank, message) of all ranks that have sent one, waiting for the first; empty on timeout.

        With `extra_fd`, the wait also ends when that descriptor becomes readable. Raises EngineDeadError.
        """
        if extra_fd is not None:
            self._poll.register(extra_fd, select.POLLIN)
        try:
            ready = self._poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1e3))
        finally:
            if extra_fd is not None:
                self._poll.unregister(extra_fd)
        ranks = [self._by_fd[fd] for fd, _ in ready if fd != extra_fd]
        try:
            return [(rank, self._ranks.replies[rank].recv_bytes()) for rank in ranks]
        except (EOFError, ConnectionError):
            raise self.wait_for_death() from None

    def wait_for_death(self) -> EngineDeadError:
        """Return the death of a rank whose connection has closed."""
        self._is_over.wait(_VERDICT_S)
        return self.death or EngineDeadError("a rank closed its connection for an unknown reason")

    def give_up(self, death: EngineDeadError) -> EngineDeadError:
        """Kill all ranks for the given reason, unless one has died already; return the actual reason."""
        if self.death is None:
            self.death = death
        self._ranks.kill()
        return self.death

    def stop(self) -> None:
        """Stop watching, so that ranks may exit."""
        os.close(self._stop_writer)
        self._thread.join()
        os.close(self._stop_reader)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._stop_reader, 0)  # hang-ups are always reported
        for fd in self._by_fd:
            poll.register(fd, select.POLLRDHUP)  # for sockets; pipes report POLLHUP
        ready = [fd for fd, _ in poll.poll()]
        if self._stop_reader not in ready:
            rank = self._by_fd[ready[0]]
            how = self._ranks.how_it_ended(rank)
            death = EngineDeadError(f"rank {rank} ({self._ranks.describe(rank)}) ended: {how}")
            if self.death is None:
                self.death = death
                logger.error("%s; the engine cannot continue", death)
            self._ranks.kill()
        self._is_over.set()
