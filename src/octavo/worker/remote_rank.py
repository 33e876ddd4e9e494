"""A rank on a cluster machine: the body of a Ray actor. Independent of Ray; steps and replies are sent over TCP."""

import hmac
import logging
import os
import queue
import socket
import threading
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec

from octavo.device.process import limit_spinning
from octavo.worker.rank_loop import RankLoop, RankSetup

TOKEN_BYTES = 32
_RANK_BYTES = 4
_CONNECT_S = 30.0


class RemoteRank:
    """Created before its rank is known: ranks are assigned once all actors are placed."""

    def __init__(self) -> None:
        self._store: socket.socket | None = None

    def process_id(self) -> int:
        """Return the pid of this process."""
        return os.getpid()

    def open_store(self, host: str) -> int:
        """Listen for the rendezvous of all ranks, on any free port; return the port. For rank 0."""
        self._store = socket.create_server((host, 0))
        port: int = self._store.getsockname()[1]
        return port

    def run(self, setup: bytes, executor: tuple[str, int], token: bytes) -> None:
        """Connect to the executor and serve until it disconnects or dies, which ends this process."""
        rank = msgspec.json.decode(setup, type=RankSetup)
        logging.basicConfig(format=f"rank {rank.rank}: %(message)s")
        limit_spinning()
        if self._store is not None:
            meeting = replace(rank.rendezvous, listen_fd=self._store.detach())
            rank = msgspec.structs.replace(rank, rendezvous=meeting)
        connection = call_executor(executor, token, rank.rank)
        RankLoop(rank, Inbox(connection).receive, connection.send_bytes).run()


class Inbox:
    """A thread that receives messages at any time, so that steps never pile up on the executor's side.

    It also detects a dead executor, which a rank blocked in a collective would not: the other ranks are dead, too.
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
    """Connect to an executor and identify this rank: the token, then the rank."""
    line = socket.create_connection(address, timeout=_CONNECT_S)
    line.sendall(token + rank.to_bytes(_RANK_BYTES, "little"))
    return as_connection(line)


def accept_rank(line: socket.socket, token: bytes) -> int | None:
    """Return the rank of the caller; None if its token is wrong. Blocks for at most the socket's timeout.

    Raises:
        OSError: it disconnects, or sends nothing.
    """
    said = bytearray()
    while len(said) < TOKEN_BYTES + _RANK_BYTES:
        piece = line.recv(TOKEN_BYTES + _RANK_BYTES - len(said))
        if not piece:
            raise ConnectionResetError("disconnected before it identified itself")
        said += piece
    is_ours = hmac.compare_digest(bytes(said[:TOKEN_BYTES]), token)
    return int.from_bytes(said[TOKEN_BYTES:], "little") if is_ours else None


def as_connection(line: socket.socket) -> "Connection[bytes, bytes]":
    """Return a message connection that sends immediately and detects a dead machine within seconds."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 1), ("KEEPINTVL", 1), ("KEEPCNT", 4), ("USER_TIMEOUT", 5000)):
        if hasattr(socket, f"TCP_{name}"):  # Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    line.setblocking(True)
    return Connection(line.detach())
