"""Listening to all ranks at once, and noticing the first that dies."""

import logging
import os
import select
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from octavo.errors import EngineDeadError
from octavo.executor.ranks import Ranks

logger = logging.getLogger(__name__)

_VERDICT_S = 10.0  # a rank has hung up; its end is known in milliseconds


class Replies:
    """What ranks send, as it comes. One thread owns it."""

    def __init__(self, connections: "Sequence[Connection[bytes, bytes]]") -> None:
        self._connections = connections
        self._ranks = {connection.fileno(): rank for rank, connection in enumerate(connections)}
        self._poll = select.poll()
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)

    def receive(self, timeout_s: float | None, beside: int | None = None) -> list[tuple[int, bytes]]:
        """Return (rank, message) of all ranks that have one, waiting for the first; nothing when time is up.

        With `beside`, the wait also ends when that descriptor can be read.

        Raises:
            EOFError: a rank has hung up.
        """
        if beside is not None:
            self._poll.register(beside, select.POLLIN)
        try:
            ready = self._poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1e3))
        finally:
            if beside is not None:
                self._poll.unregister(beside)
        return [(self._ranks[fd], self._read(self._connections[self._ranks[fd]])) for fd, _ in ready if fd != beside]

    def _read(self, connection: "Connection[bytes, bytes]") -> bytes:
        try:
            return connection.recv_bytes()
        except ConnectionError as error:
            raise EOFError(str(error)) from error


class DeathWatch:
    """A thread that sleeps until a rank dies, then ends the others: those in a collective would wait for ever."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._death: EngineDeadError | None = None
        self._is_over = threading.Event()
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="octavo-death-watch", daemon=True)
        self._thread.start()

    @property
    def death(self) -> EngineDeadError | None:
        """Which rank died, and how; None as long as all live."""
        return self._death

    def wait_for_death(self) -> EngineDeadError:
        """Return the death of a rank that has hung up already."""
        self._is_over.wait(_VERDICT_S)
        return self._death or EngineDeadError("a rank has stopped talking, and nobody knows why")

    def give_up(self, death: EngineDeadError) -> EngineDeadError:
        """End all ranks for a reason of our own, unless one died before; return what counts."""
        if self._death is None:
            self._death = death
        self._ranks.kill()
        return self._death

    def stop(self) -> None:
        """Watch no longer: from here on, ranks may leave."""
        os.close(self._stop_writer)
        self._thread.join()
        os.close(self._stop_reader)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._stop_reader, 0)  # hang-ups are always reported
        fds = {connection.fileno(): rank for rank, connection in enumerate(self._ranks.replies)}
        for fd in fds:
            poll.register(fd, select.POLLRDHUP)  # of sockets; pipes hang up
        ready = [fd for fd, _ in poll.poll()]
        if self._stop_reader not in ready:
            rank = fds[ready[0]]
            how = self._ranks.how_it_ended(rank)
            death = EngineDeadError(f"rank {rank} ({self._ranks.describe(rank)}) ended: {how}")
            if self._death is None:
                self._death = death
                logger.error("%s; the engine cannot go on without it", death)
            self._ranks.kill()
        self._is_over.set()
