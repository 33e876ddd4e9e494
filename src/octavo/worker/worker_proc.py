"""The process of a rank on this host. Run by `MultiprocExecutor`.

It exits with code 0, immediately and whatever it is doing, when its parent closes the pipe or dies.
"""

import logging
import os
import select
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from octavo.device.process import limit_spinning
from octavo.distributed.shm_broadcast import ReaderEnd, RingReader
from octavo.worker.rank_loop import RankLoop, RankSetup

_PARENT_CHECK_MS = 500


class LocalSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by the parent on standard input, as one line of JSON. Descriptors are inherited."""

    rank: RankSetup
    orders: ReaderEnd
    replies_fd: int


class WorkerProc:
    """One rank: receives steps through the ring, and sends replies through its own pipe."""

    def __init__(self, setup: LocalSetup) -> None:
        replies = Connection(setup.replies_fd, readable=False)
        self._loop = RankLoop(setup.rank, RingReader(setup.orders).read, replies.send_bytes)

    def run(self) -> None:
        """Serve until the process exits."""
        self._loop.run()


def main() -> None:
    """Read the setup from standard input and serve until the process exits."""
    parent = os.getppid()
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=LocalSetup)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    logging.basicConfig(format=f"rank {setup.rank.rank}: %(message)s")
    limit_spinning()  # before the worker imports torch
    WorkerProc(setup).run()


def _end_with_parent(parent: int) -> None:
    """Watch the pipe that the parent holds open: the kernel's death signal fires when the parent's *thread* ends.

    The check of the parent's pid is for parents that have forked: then others hold the pipe open, too.
    """
    pipe = select.poll()
    pipe.register(sys.stdin.fileno(), select.POLLIN)
    while not pipe.poll(_PARENT_CHECK_MS) and os.getppid() == parent:
        pass
    logging.shutdown()
    os._exit(0)  # no cleanup: libraries that communicate with other ranks might wait for them


if __name__ == "__main__":
    main()
