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
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any, Self

import msgspec
import zmq

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import (
    CallMethod,
    CallResult,
    CoreFailed,
    CoreReady,
    EngineCoreOutputs,
    FromCore,
    Shutdown,
    ToCore,
)
from octavo.contracts.frames import encode_frames, plain
from octavo.errors import EngineDeadError, OctavoError, anew, named_error
from octavo.working_folder import child_environment

logger = logging.getLogger("octavo.engine.process")  # what the child prints

_MAX_FOLDER_CHARACTERS = 60  # an address of a Unix socket has at most 104 bytes, the random folder's name included
_LAST_WORDS_MS = 10  # for messages of a child that has exited to arrive
_MAX_BEGUN_BYTES = 1 << 20  # tens of thousands of ids
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


class BegunRequests:
    """The ids of requests that a core has begun with: a file without a name, which outlives the core that writes it.

    A message would be lost with the process, and it is the last ones that matter.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def make(cls) -> Self:
        """Return the parent's side."""
        if hasattr(os, "memfd_create"):  # in memory: there is no disk that may be full
            return cls(os.memfd_create("octavo-begun"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def add(self, request_ids: Iterable[str], unfinished: Iterable[str]) -> None:
        """Write down ids, before anything is done with the requests. Forgets all that are not unfinished, if many."""
        if os.lseek(self.descriptor, 0, os.SEEK_CUR) > _MAX_BEGUN_BYTES:
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            os.ftruncate(self.descriptor, 0)
            request_ids = unfinished
        os.write(self.descriptor, "".join(f"{each}\n" for each in request_ids).encode())

    def read(self) -> set[str]:
        """Return all ids; finished ones may be among them."""
        size = os.fstat(self.descriptor).st_size
        return set(os.pread(self.descriptor, size, 0).decode().splitlines())

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class ChildCore:
    """One child, its sockets, and what it has said. `deliver` gets that it is ready, its outputs, and None: it died.

    It loads nothing before `begin`. If that `comes_later`, it first imports what a rank needs: most of a start's time.
    """

    def __init__(
        self,
        command: Sequence[str],
        sockets: "zmq.Context[zmq.Socket[bytes]]",
        deliver: "Callable[[ChildCore, EngineCoreOutputs | CoreReady | None], None]",
        *,
        comes_later: bool = False,
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
        self._is_closing = self._has_begun = False
        self._heard_s = time.monotonic()  # when it last said something, or had nothing to say
        self._stall = ""  # that it was killed because it said nothing
        self.begun = BegunRequests.make()
        self.ready: CoreReady | None = None
        self.death: OctavoError | None = None  # None while it is alive
        arguments = [self._addresses.prefix, str(self.begun.descriptor), *(["import"] if comes_later else [])]
        try:
            self.child = subprocess.Popen(
                [*command, *arguments],
                pass_fds=[self.begun.descriptor],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
        except OSError:
            self._let_go()
            raise
        assert self.child.stdin is not None
        assert self.child.stderr is not None
        self._relay = relay_lines(self.child.stderr)

    def begin(self, config: EngineConfig) -> None:
        """Let the child load. Idempotent."""
        if self._has_begun:
            return
        self._has_begun = True
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has exited; `notice_exit` reports why
            self.child.stdin.write(msgspec.json.encode(config, enc_hook=plain) + b"\n")
            self.child.stdin.flush()

    @property
    def has_exited(self) -> bool:
        """Whether the process is gone."""
        return self.child.poll() is not None

    def try_send(self, message: ToCore) -> bool:
        """Send a message; return False if nobody takes it: the child is dead, or has not started to listen."""
        frames = encode_frames(message)
        with self._send_lock:
            if self.death is not None:
                return False
            try:
                self._to_core.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
            except zmq.Again:
                return False
            return True

    def start_call(self, method: str, arguments: Sequence[Any]) -> Future[Any]:
        """Return what will have the result of a call. A core that dies before raises EngineDeadError."""
        call_id, done = next(self._call_ids), Future[Any]()
        self._calls[call_id] = done
        if not self.try_send(CallMethod(call_id=call_id, method=method, arguments=list(arguments))):
            done = self._calls.pop(call_id, done)
            if not done.done():
                done.set_exception(EngineDeadError("the engine process has just died"))
        return done

    def receive(self) -> None:
        """Process a message that has come."""
        self._heard_s = time.monotonic()
        match self._decode(self.from_core.recv()):
            case EngineCoreOutputs() as outputs:
                self._deliver(self, outputs)
            case CoreReady() as ready:
                self.ready = ready
                self._deliver(self, ready)
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

    def check_progress(self, now_s: float, stall_timeout_s: float) -> None:
        """Kill the child if it has said nothing for this long. 0: it may be silent."""
        if stall_timeout_s == 0.0:
            self._heard_s = now_s
        elif now_s - self._heard_s > stall_timeout_s and not self._stall:
            self._stall = (
                f"the engine process made no progress in {stall_timeout_s:g} s, with requests to run, and was "
            )
            self.child.kill()

    def bury(self) -> None:
        """It is dead: end what is left of its process, and let go of what connects to it."""
        self.child.kill()
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        self._let_go()

    def _let_go(self) -> None:
        with self._send_lock:
            self._to_core.close(linger=0)
        self.from_core.close(linger=0)
        self._addresses.delete()
        self.begun.close()

    def begin_close(self) -> None:
        """Tell the child to exit, without waiting for it."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.ready is None:  # it would hear of it when the model is loaded, and holds nothing for anyone
            self.child.kill()
        self.try_send(Shutdown())
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
        self.begun.close()

    def _die(self, death: OctavoError | None = None) -> None:
        """Fail all waiting calls, with the first cause of death; by default the child's exit."""
        if death is None:
            code = self.child.returncode
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            death = EngineDeadError(f"{self._stall or 'the engine process ended '}({how})")
        with self._send_lock:
            if self.death is not None:
                return
            self.death = death
        while self._calls:
            self._calls.popitem()[1].set_exception(anew(death))
        self._deliver(self, None)


def relay_lines(pipe: IO[bytes]) -> threading.Thread:
    """Log every line of a child's error output, in a thread that ends when the other side closes the pipe."""

    def relay() -> None:
        with pipe:
            for line in pipe:
                logger.warning("%s", line.decode(errors="replace").rstrip())

    thread = threading.Thread(target=relay, name="octavo-engine-log", daemon=True)
    thread.start()
    return thread
