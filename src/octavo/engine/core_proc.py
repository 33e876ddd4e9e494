"""The child process: an engine core on two sockets. Run by `ProcessClient`, with the prefix of their addresses
and the descriptor of a file for `BegunRequests`; "import" behind them: its configuration may come much later.

Exits with code 0 when told to or when its parent has exited, and with 1 when it fails.
"""

import contextlib
import logging
import os
import sys
import threading
import time

import msgspec
import zmq

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import AddRequests, CallMethod, CallResult, CoreFailed, FromCore, Shutdown, ToCore
from octavo.contracts.frames import FrameDecoder
from octavo.device.process import freeze_loaded_objects, without_garbage_collection
from octavo.engine.child_core import BegunRequests, CoreSockets
from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError, EngineError, OctavoError, UserError
from octavo.executor.base import import_rank, make_executor

logger = logging.getLogger(__name__)

_QUIET_MS = 200  # without messages or work, before checking ranks and preparing later steps
_LEAVE_S = 5.0  # for a graceful shutdown, including a step in flight


class CoreProc:
    """Processes messages and steps; when idle, prepares later steps, then sleeps."""

    def __init__(self, addresses: CoreSockets, begun: BegunRequests) -> None:
        self._begun = begun
        sockets = zmq.Context()
        self._inbox = sockets.socket(zmq.PULL)
        self._outbox = sockets.socket(zmq.PUSH)
        for socket, name in ((self._inbox, "to-core"), (self._outbox, "from-core")):
            socket.set_hwm(0)
            addresses.connect(socket, name)
        self._decode = FrameDecoder(ToCore).decode
        self._sockets = sockets
        self._is_preparing = False

    def run(self, config: EngineConfig) -> int:
        """Serve until told to stop; return the exit code."""
        try:
            with without_garbage_collection():
                core = EngineCore(config, make_executor(config), on_begin=self._begun.add)
            with contextlib.closing(core):
                self._serve(core)
            return 0
        except Exception as error:
            if not isinstance(error, UserError):  # the parent reports it to the user, without a traceback
                logger.exception("the engine core cannot continue")
            self._send(CoreFailed(error_type=type(error).__name__, message=str(error)))
            return 1
        finally:
            self._sockets.destroy(linger=1000)

    def _serve(self, core: EngineCore) -> None:
        freeze_loaded_objects()
        self._send(core.ready)
        while self._handle_messages(core):
            if core.has_work():
                self._send(core.step())
                self._is_preparing = False
            else:
                self._is_preparing = core.prepare()

    def _handle_messages(self, core: EngineCore) -> bool:
        """Handle all pending messages; without work, wait briefly for one. Returns False when told to stop."""
        while self._inbox.poll(0 if core.has_work() or self._is_preparing else _QUIET_MS):
            match self._decode(self._inbox.recv_multipart()):
                case AddRequests(requests=requests):
                    for request in requests:
                        core.add_request(request)
                case CallMethod(call_id=None, method=method, arguments=arguments):
                    getattr(core, method)(*arguments)
                case CallMethod(call_id=int() as call_id) as call:
                    self._call(core, call_id, call)
                case Shutdown():
                    return False
        return True

    def _call(self, core: EngineCore, call_id: int, call: CallMethod) -> None:
        try:
            value = getattr(core, call.method)(*call.arguments)
        except EngineDeadError:
            raise
        except Exception as error:  # reported to the caller; the core continues
            logger.exception("%s failed", call.method)
            is_ours = isinstance(error, OctavoError)
            kind, text = (type(error), str(error)) if is_ours else (EngineError, f"{type(error).__name__}: {error}")
            self._send(CallResult(call_id=call_id, error_type=kind.__name__, error=text))
        else:
            self._send(CallResult(call_id=call_id, value=value))

    def _send(self, message: FromCore) -> None:
        self._outbox.send(msgspec.msgpack.encode(message))


def main() -> int:
    """Read the configuration from standard input and serve."""
    addresses = CoreSockets(sys.argv[1])
    if sys.argv[3:]:
        import_rank()
    if not (line := sys.stdin.buffer.readline()):  # the parent has exited
        addresses.delete()
        return 0
    config = msgspec.json.decode(line, type=EngineConfig)
    threading.Thread(target=_exit_when_parent_is_gone, args=(os.getppid(), addresses), daemon=True).start()
    return CoreProc(addresses, BegunRequests(int(sys.argv[2]))).run(config)


def _exit_when_parent_is_gone(parent: int, addresses: CoreSockets) -> None:
    """Watch the pipe: a death signal from the kernel would fire when the parent's *thread* ends."""
    # Ends when the parent closes the pipe, or dies. Not `sys.stdin.read`: the lock it holds while waiting would abort
    # the interpreter at exit.
    while os.read(sys.stdin.fileno(), 1):
        pass
    deadline_s = time.monotonic() + _LEAVE_S
    while os.getppid() == parent and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if os.getppid() != parent:
        addresses.delete()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
