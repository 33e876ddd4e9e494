"""An engine core's process as its parent sees it: the child, the two sockets between them, and what it has said."""

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any, Self

import msgspec
import zmq

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import CallMethod, CallResult, CoreFailed, CoreReady, EngineCoreOutputs, FromCore, Shutdown
from octavo.contracts.frames import encode_frames, plain
from octavo.errors import EngineDeadError, OctavoError, anew, named_error
from octavo.working_folder import child_environment

logger = logging.getLogger("octavo.engine.process")  # what the child prints

_MAX_FOLDER_CHARACTERS = 60  # an address of a Unix socket has at most 104 bytes, the random folder's name included
_LAST_WORDS_MS = 10  # for messages of a child that has exited to arrive
_CLOSE_S = 5.0  # how long a child may take to exit


@dataclass(frozen=True, slots=True)
class CoreSockets:
    """Addresses that only processes of this user can connect to; made by the client, found by its child.

    On Linux they are names in the abstract namespace, which end with the sockets, however their processes die. Any user
    can read and try such a name, so the kernel is asked who connects. Elsewhere they are files in a folder that is
    closed to others, which the client deletes, or the child when its parent was killed.
    """

    prefix: str  # what `ipc://` addresses start with

    @classmethod
    def make(cls, *, is_abstract: bool = sys.platform == "linux") -> Self:
        """Return new addresses."""
        if is_abstract:
            return cls(f"@octavo-{secrets.token_hex(16)}-")
        has_short_paths = len(os.fsencode(tempfile.gettempdir())) <= _MAX_FOLDER_CHARACTERS
        return cls(tempfile.mkdtemp(prefix="octavo-", dir=None if has_short_paths else "/tmp") + os.sep)

    @property
    def _is_abstract(self) -> bool:
        return self.prefix.startswith("@")

    def bind(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """Bind the client's side."""
        if self._is_abstract:
            socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        socket.bind(f"ipc://{self.prefix}{name}")

    def connect(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        """Connect the child's side."""
        socket.connect(f"ipc://{self.prefix}{name}")

    def delete(self) -> None:
        """Leave nothing behind. Idempotent."""
        if not self._is_abstract:
            with contextlib.suppress(FileNotFoundError):  # the other process was faster
                shutil.rmtree(self.prefix)


class ChildCore:
    """One child, its sockets, and what it has said. `deliver` gets its outputs; None once it is dead."""

    def __init__(
        self,
        command: Sequence[str],
        config: EngineConfig,
        sockets: "zmq.Context[zmq.Socket[bytes]]",
        deliver: Callable[[EngineCoreOutputs | None], None],
    ) -> None:
        self._addresses = CoreSockets.make()
        self._to_core, self.from_core = sockets.socket(zmq.PUSH), sockets.socket(zmq.PULL)
        for socket, name in ((self._to_core, "to-core"), (self.from_core, "from-core")):
            socket.set_hwm(0)  # never drop; admission limits what is outstanding
            self._addresses.bind(socket, name)
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        self._deliver = deliver
        self._send_lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._is_closing = False
        self.ready: CoreReady | None = None
        self.death: OctavoError | None = None  # None while it is alive
        try:
            self.child = subprocess.Popen(
                [*command, self._addresses.prefix],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
        except OSError:
            self._addresses.delete()
            raise
        assert self.child.stdin is not None
        assert self.child.stderr is not None
        self._relay = relay_lines(self.child.stderr)
        with contextlib.suppress(BrokenPipeError):  # it has exited; `notice_exit` reports why
            self.child.stdin.write(msgspec.json.encode(config, enc_hook=plain) + b"\n")
            self.child.stdin.flush()

    def try_send(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Send a message; return False if nobody is there any more to take it, which has not been noticed yet."""
        with self._send_lock:
            if self.death is not None:
                raise anew(self.death)
            try:
                self._to_core.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
            except zmq.Again:
                return False
            return True

    def new_call(self, method: str, arguments: Sequence[Any]) -> tuple[Future[Any], CallMethod]:
        """Return what will have the result of a call, and the message that asks for it."""
        call_id, done = next(self._call_ids), Future[Any]()
        self._calls[call_id] = done
        return done, CallMethod(call_id=call_id, method=method, arguments=list(arguments))

    def receive(self) -> None:
        """Process a message that has come."""
        match self._decode(self.from_core.recv()):
            case EngineCoreOutputs() as outputs:
                self._deliver(outputs)
            case CoreReady() as ready:
                self.ready = ready
            case CoreFailed() as failed:
                self._die(named_error(failed.error_type, failed.message))
            case CallResult(error_type=None) as result:
                self._calls.pop(result.call_id).set_result(result.value)
            case CallResult(error_type=str() as error_type) as result:
                self._calls.pop(result.call_id).set_exception(named_error(error_type, result.error))

    def notice_exit(self) -> None:
        """If the child has exited without a message that is still to be received, it is dead."""
        if self.death is None and self.child.poll() is not None and not self.from_core.poll(_LAST_WORDS_MS):
            self._die()

    def begin_close(self) -> None:
        """Tell the child to exit, without waiting for it."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.ready is None:  # it would hear of it when the model is loaded, and holds nothing for anyone
            self.child.kill()
        with contextlib.suppress(OctavoError):  # already dead
            self.try_send(encode_frames(Shutdown()))
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it exited before reading its configuration
            self.child.stdin.close()

    def finish_close(self) -> None:
        """Wait until the child has exited; leave nothing behind. Idempotent."""
        try:
            self.child.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self._relay.join()
        self._die()
        self._addresses.delete()

    def _die(self, death: OctavoError | None = None) -> None:
        """Fail all waiting calls, with the first cause of death; by default the child's exit."""
        if death is None:
            code = self.child.returncode
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            death = EngineDeadError(f"the engine process ended ({how})")
        with self._send_lock:
            if self.death is not None:
                return
            self.death = death
        for waiting in list(self._calls.values()):
            waiting.set_exception(anew(death))
        self._deliver(None)


def relay_lines(pipe: IO[bytes]) -> threading.Thread:
    """Log every line of a child's error output, in a thread that ends when the other side closes the pipe."""

    def relay() -> None:
        with pipe:
            for line in pipe:
                logger.warning("%s", line.decode(errors="replace").rstrip())

    thread = threading.Thread(target=relay, name="octavo-engine-log", daemon=True)
    thread.start()
    return thread
