"""The engine core in a child process: msgpack messages over two ZMQ sockets, one per direction.

The child runs `octavo.engine.core_proc`, so no program needs a `__main__` guard. It reads its configuration
from standard input, and that pipe stays open: when it closes, the parent has exited and the child exits, too.
"""

import contextlib
import itertools
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from octavo.child_python import child_command, child_environment
from octavo.config.engine import EngineConfig
from octavo.contracts.engine import (
    AbortRequests,
    AddRequests,
    CallMethod,
    CallResult,
    CoreFailed,
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    FromCore,
    Shutdown,
    ToCore,
)
from octavo.contracts.frames import encode_frames, plain
from octavo.engine.child_output import relay_lines
from octavo.engine.core_client import CoreMethod
from octavo.engine.core_sockets import CoreSockets
from octavo.errors import EngineDeadError, EngineError, OctavoError, anew, named_error

_POLL_MS = 100  # how often a waiting listener checks that the child is alive
_UNHEARD_S = 0.01  # between attempts to send to a child that has just died
_CLOSE_S = 5.0  # how long the child may take to exit


class ProcessClient:
    """Implements `EngineCoreClient`. Starts the child, which loads the model; a thread receives from it."""

    # Followed by the prefix of the addresses of the sockets.
    command: Sequence[str] = child_command("octavo.engine.core_proc")

    def __init__(self, config: EngineConfig, deliver: Callable[[EngineCoreOutputs | None], None] | None = None) -> None:
        """`deliver` gets outputs instead of `get_outputs`, on the receiving thread; None once the child has exited.

        Raises:
            EngineDeadError: the process cannot be started.
        """
        self._addresses = CoreSockets.make()
        self._sockets = zmq.Context()
        self._to_core = self._bind(zmq.PUSH, "to-core")
        self._from_core = self._bind(zmq.PULL, "from-core")
        self._send_lock = threading.Lock()
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | None] = queue.SimpleQueue()  # None: see `_death`
        self._deliver = deliver or self._outputs.put
        self._ready: Future[CoreReady] = Future()
        self._calls: dict[int, Future[None]] = {}
        self._call_ids = itertools.count()
        self._death: OctavoError | None = None
        self._is_closing = self._is_closed = False
        try:
            self._child = self._start(config)
        except OSError as error:
            self._clean_up()
            raise EngineDeadError(f"the engine process could not be started: {error}") from error
        self._listener = threading.Thread(target=self._listen, name="octavo-listener", daemon=True)
        self._listener.start()

    @property
    def profile(self) -> str:
        return self._ready.result().profile

    @property
    def kv_tokens(self) -> int:
        return self._ready.result().kv_tokens

    @property
    def death(self) -> OctavoError | None:
        """Why the child exited; None while it is alive."""
        return self._death

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def load(self) -> None:
        self._ready.result()

    def add(self, requests: list[EngineCoreRequest]) -> None:
        self._send(AddRequests(requests=requests))

    def abort(self, request_ids: list[str]) -> None:
        self._send(AbortRequests(request_ids=request_ids))

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        try:
            outputs = self._outputs.get(block=timeout_s != 0.0, timeout=timeout_s)
        except queue.Empty:
            return None
        if outputs is None:
            self._outputs.put(None)  # for the next call
            assert self._death is not None
            raise anew(self._death)
        return outputs

    def call(self, method: CoreMethod) -> None:
        call_id, done = next(self._call_ids), Future[None]()
        self._calls[call_id] = done
        self._send(CallMethod(call_id=call_id, method=method))
        done.result()

    def close(self) -> None:
        self.begin_close()
        self.finish_close()

    def begin_close(self) -> None:
        """Tell the child to exit, without waiting for it."""
        if self._is_closing:
            return
        self._is_closing = True
        if not self._ready.done():  # it would hear of it when the model is loaded, and holds nothing for anyone
            self._child.kill()
        with contextlib.suppress(OctavoError):  # already dead
            self._send(Shutdown())
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it exited before reading its configuration
            self._child.stdin.close()

    def finish_close(self) -> None:
        """Wait until the child has exited; leave nothing behind."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._child.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._listener.join()
        self._relay.join()
        self._clean_up()

    def _clean_up(self) -> None:
        self._sockets.destroy(linger=0)
        self._addresses.delete()

    def _bind(self, kind: int, name: str) -> "zmq.Socket[bytes]":
        socket = self._sockets.socket(kind)
        socket.set_hwm(0)  # never drop; admission limits what is outstanding
        self._addresses.bind(socket, name)
        return socket

    def _start(self, config: EngineConfig) -> "subprocess.Popen[bytes]":
        command = [*self.command, self._addresses.prefix]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment())
        assert child.stdin is not None
        assert child.stderr is not None
        self._relay = relay_lines(child.stderr)
        with contextlib.suppress(BrokenPipeError):  # it has exited; the listener reports why
            child.stdin.write(msgspec.json.encode(config, enc_hook=plain) + b"\n")
            child.stdin.flush()
        return child

    def _send(self, message: ToCore) -> None:
        frames = encode_frames(message)
        while True:
            if self._death is not None:
                raise anew(self._death)
            try:
                with self._send_lock:
                    self._to_core.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
                return
            except zmq.Again:
                # The child has exited: a blocking send would wait forever, and the listener is about to notice.
                time.sleep(_UNHEARD_S)

    def _listen(self) -> None:
        """Dispatch messages from the child until it exits."""
        decode = msgspec.msgpack.Decoder(FromCore).decode
        while True:
            if self._from_core.poll(_POLL_MS):
                self._settle(decode(self._from_core.recv()))
            elif self._child.poll() is not None:
                break
        self._bury(EngineDeadError(f"the engine process ended ({_how_it_ended(self._child.returncode)})"))

    def _settle(self, message: FromCore) -> None:
        match message:
            case EngineCoreOutputs():
                self._deliver(message)
            case CoreReady():
                self._ready.set_result(message)
            case CoreFailed():
                self._bury(named_error(message.error_type, message.message))
            case CallResult(error=None):
                self._calls.pop(message.call_id).set_result(None)
            case CallResult():
                self._calls.pop(message.call_id).set_exception(EngineError(message.error))

    def _bury(self, death: OctavoError) -> None:
        """Fail all waiting calls, with the first cause of death."""
        if self._death is not None:
            return
        self._death = death
        futures: list[Future[Any]] = [self._ready, *self._calls.values()]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(anew(death))
        self._deliver(None)


def _how_it_ended(returncode: int) -> str:
    return f"killed by signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
