"""A rank on some machine of a cluster: the body of a Ray actor. Knows nothing of Ray; orders and replies go by TCP."""

import hmac
import logging
import os
import queue
import socket
import threading
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec

from octavo.device.threads import limit_spinning
from octavo.worker.rank_loop import RankLoop, RankSetup, WorkerWrapperBase

TOKEN_BYTES = 32
_RANK_BYTES = 4
_CONNECT_S = 30.0


class RemoteRank:
    """Made first, told its rank later: which rank is where is settled when all are placed."""

    def __init__(self) -> None:
        self._store: socket.socket | None = None

    def process_id(self) -> int:
        """Return the number of this process on its machine."""
        return os.getpid()

    def open_store(self, host: str) -> int:
        """Listen where the ranks will meet, on any free port; return the port. For rank 0."""
        self._store = socket.create_server((host, 0))
        port: int = self._store.getsockname()[1]
        return port

    def run(self, setup: bytes, executor: tuple[str, int], token: bytes) -> None:
        """Connect to the executor and serve. Ends with the process: when the executor hangs up, or is gone."""
        rank = msgspec.json.decode(setup, type=RankSetup)
        logging.basicConfig(format=f"rank {rank.rank}: %(message)s")
        limit_spinning()
        if self._store is not None:
            meeting = replace(rank.rendezvous, listen_fd=self._store.detach())
            rank = msgspec.structs.replace(rank, rendezvous=meeting)
        connection = call_executor(executor, token, rank.rank)
        RankLoop(WorkerWrapperBase(rank), Inbox(connection).receive, connection.send_bytes).run()


class Inbox:
    """A thread that takes in what comes, whatever the rank is doing: orders never pile up at the executor's end.

    And it notices when the executor is gone. A rank in a collective would not: the others are gone as well.
    """

    def __init__(self, connection: "Connection[bytes, bytes]") -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.receive = self._messages.get
        threading.Thread(target=self._listen, name="octavo-inbox", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            logging.shutdown()
            os._exit(0)


def call_executor(address: tuple[str, int], token: bytes, rank: int) -> "Connection[bytes, bytes]":
    """Connect to an executor, and say who is there: the token, then the rank."""
    line = socket.create_connection(address, timeout=_CONNECT_S)
    line.sendall(token + rank.to_bytes(_RANK_BYTES, "little"))
    return as_connection(line)


def answer_rank(line: socket.socket, token: bytes) -> int | None:
    """Return the rank that calls; None when it is somebody else. Blocks for as long as the socket's timeout.

    Raises:
        OSError: it hangs up, or says nothing.
    """
    said = bytearray()
    while len(said) < TOKEN_BYTES + _RANK_BYTES:
        piece = line.recv(TOKEN_BYTES + _RANK_BYTES - len(said))
        if not piece:
            raise ConnectionResetError("hung up before it said who it is")
        said += piece
    is_ours = hmac.compare_digest(bytes(said[:TOKEN_BYTES]), token)
    return int.from_bytes(said[TOKEN_BYTES:], "little") if is_ours else None


def as_connection(line: socket.socket) -> "Connection[bytes, bytes]":
    """Return a connection for whole messages that sends at once, and notices within seconds when a machine is gone."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 1), ("KEEPINTVL", 1), ("KEEPCNT", 4), ("USER_TIMEOUT", 5000)):
        if hasattr(socket, f"TCP_{name}"):  # Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    line.setblocking(True)
    return Connection(line.detach())
