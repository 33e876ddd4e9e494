"""A rank of an executor in its own process: on this host, where `MultiprocExecutor` runs this file, or on another."""

import hmac
import logging
import os
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, get_type_hints

import msgspec

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace, Rendezvous
from octavo.contracts.ranks import FromRank, RankCall, RankFailure, RankResult, decode_rank_message, encode_rank_message
from octavo.contracts.schedule import SchedulerOutput
from octavo.device.process import limit_spinning
from octavo.distributed.shm_broadcast import ReaderEnd, RingReader

TOKEN_BYTES = 32
_RANK_BYTES = 4

DEFAULT_WORKER = "octavo.worker.worker:Worker"


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments for building a rank's worker."""

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous
    worker_class: str = DEFAULT_WORKER  # "module:class"


class WorkerProc:
    """Builds a rank's worker in its own process, then serves calls and steps, independent of the transport.

    All ranks reply to a call. One rank (`RankPlace.returns_output`) replies to a step, any rank to its failure.

    A call that goes on beside later steps is replied to by the thread that ends it.
    """

    def __init__(self, setup: RankSetup, receive: Callable[[], bytes], send: Callable[[bytearray], None]) -> None:
        self._setup = setup
        self._place = RankPlace.of(setup.rank, setup.config.parallel)
        self._worker: Any = None  # an instance of `setup.worker_class`, once `init_worker` has been called
        self._receive, self._send = receive, send
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Serve until the executor disconnects: then `receive` raises EOFError, or this process has exited."""
        while True:
            message = decode_rank_message(self._receive())
            if isinstance(message, SchedulerOutput):
                self._step(message)
            else:
                self._call(message)

    def init_worker(self) -> str:
        """Import and build the worker, which connects to the other ranks; return its profile.

        A call like others: a process can report that it is alive before it imports what the worker needs.
        """
        module, _, name = self._setup.worker_class.partition(":")
        self._worker = getattr(import_module(module), name)(self._setup.config, self._place, self._setup.rendezvous)
        profile: str = self._worker.profile
        return profile

    def _step(self, scheduler_output: SchedulerOutput) -> None:
        try:
            model_output = self._worker.begin(scheduler_output).result()
        except Exception as error:  # noqa: BLE001 - any error fails the requests of this step
            self._reply(_failure(error, step=scheduler_output.step))
        else:
            if self._place.returns_output:
                self._reply(msgspec.structs.replace(model_output, req_ids=()))  # the scheduler knows them

    def _call(self, call: RankCall) -> None:
        target = self if self._worker is None else self._worker
        hints = get_type_hints(getattr(target, call.method)).values()  # in the order of the parameters
        call_worker(
            target,
            call.method,
            [msgspec.convert(argument, hint) for argument, hint in zip(call.arguments, hints, strict=False)],
            lambda value: self._reply(RankResult(call_id=call.call_id, value=value)),
            lambda error: self._reply(_failure(error, call_id=call.call_id)),
        )

    def _reply(self, message: FromRank) -> None:
        encoded = encode_rank_message(message)
        with self._send_lock:
            self._send(encoded)


def call_worker(
    worker: object,
    method: str,
    arguments: Sequence[Any],
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Call a method by its name and report how it ended; one that returns a future ends as that does."""

    def end(done: Future[Any]) -> None:
        if (error := done.exception()) is not None:
            fail(error)
        else:
            succeed(done.result())

    try:
        value = getattr(worker, method)(*arguments)
    except Exception as error:  # noqa: BLE001 - reported to the caller
        fail(error)
        return
    if isinstance(value, Future):
        value.add_done_callback(end)
    else:
        succeed(value)


def call_here(worker: object, method: str, arguments: Sequence[Any]) -> Future[list[Any]]:
    """Call a method of the only rank, in this process; the result is the list of its one value."""
    values: Future[list[Any]] = Future()
    call_worker(worker, method, arguments, lambda value: values.set_result([value]), values.set_exception)
    return values


def _failure(error: BaseException, *, step: int | None = None, call_id: int = -1) -> RankFailure:
    return RankFailure(
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        step=step,
        call_id=call_id,
    )


class LocalSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by the parent on standard input, as one line of JSON. Descriptors are inherited."""

    rank: RankSetup
    orders: ReaderEnd
    replies_fd: int


def main() -> None:
    """Read the setup from standard input and serve: steps come through the ring, replies go through a pipe of our own.

    The process exits with code 0, immediately and whatever it is doing, when its parent closes the pipe or dies.
    """
    parent = os.getppid()
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=LocalSetup)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    logging.basicConfig(format=f"rank {setup.rank.rank}: %(message)s")
    limit_spinning()  # before the worker imports torch
    replies = Connection(setup.replies_fd, readable=False)
    WorkerProc(setup.rank, RingReader(setup.orders).read, replies.send_bytes).run()


def _end_with_parent(parent: int) -> None:
    """Watch the pipe that the parent holds open: the kernel's death signal fires when the parent's *thread* ends.

    The check of the parent's pid is for parents that have forked: then others hold the pipe open, too.
    """
    pipe = select.poll()
    pipe.register(sys.stdin.fileno(), select.POLLIN)
    while not pipe.poll(500) and os.getppid() == parent:
        pass
    logging.shutdown()
    os._exit(0)  # no cleanup: libraries that communicate with other ranks might wait for them


class RemoteRank:
    """The body of a Ray actor, independent of Ray: steps and replies are sent over TCP.

    Created before its rank is known: ranks are assigned once all actors are placed.
    """

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
        line = socket.create_connection(executor, timeout=30.0)
        line.sendall(token + rank.rank.to_bytes(_RANK_BYTES, "little"))  # see `accept_rank`
        connection = as_connection(line)
        WorkerProc(rank, start_receiving(connection), connection.send_bytes).run()


def start_receiving(connection: "Connection[bytes, bytes]") -> Callable[[], bytes]:
    """Start a thread that receives, so that steps never pile up on the executor's side; return how to get a message.

    It also detects a dead executor, which a rank blocked in a collective would not: the other ranks are dead, too.
    """
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            logging.shutdown()
            os._exit(0)

    threading.Thread(target=listen, name="octavo-inbox", daemon=True).start()
    return messages.get


def accept_rank(line: socket.socket, token: bytes) -> int | None:
    """Return the rank of the caller; None if its token is wrong. Blocks for at most the socket's timeout.

    Raises OSError: it disconnects, or sends nothing.
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


if __name__ == "__main__":
    main()
