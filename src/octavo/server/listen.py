"""The socket and uvicorn: `serve` runs a server from its first byte to its exit code."""

import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from octavo.config.args import EngineArgs
from octavo.errors import InvalidParameterError
from octavo.server.app import create_app
from octavo.server.args import ServerArgs
from octavo.server.lifecycle import EngineLifecycle

logger = logging.getLogger(__name__)

_BACKLOG = 2048


def serve(engine_args: EngineArgs, args: ServerArgs, on_listening: Callable[[str], None] = logger.info) -> None:
    """Listen, load the model meanwhile, serve until a signal or the engine's end.

    Raises:
        InvalidParameterError: nothing can listen there.
        OctavoError: the model could not be loaded, or the engine died.
    """
    listener = bind(args)
    lifecycle = EngineLifecycle(engine_args, args)
    lifecycle.start_loading()
    config = uvicorn.Config(
        create_app(lifecycle, args), loop="uvloop", http="httptools", ws="none", log_config=None, access_log=False,
        server_header=False, backlog=_BACKLOG, root_path=args.root_path,
    )  # fmt: skip
    server = Server(config)
    lifecycle.on_end = server.stop
    on_listening(url_of(listener, args))
    server.run(sockets=[listener])
    if lifecycle.failure is not None:
        raise lifecycle.failure


def bind(args: ServerArgs) -> socket.socket:
    """Return a socket that listens already: clients may connect while the rest is still being imported."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((args.host, args.port))
    except OSError as error:
        listener.close()
        raise InvalidParameterError("port", f"{args.host}:{args.port}", f"cannot listen there: {error}") from error
    listener.listen(_BACKLOG)
    return listener


def url_of(listener: socket.socket, args: ServerArgs) -> str:
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http://{host}:{listener.getsockname()[1]}{args.root_path}"


class Server(uvicorn.Server):
    """uvicorn's server, which ends with an exit code of ours instead of dying of the signal that stopped it."""

    def stop(self) -> None:
        """End; requests that run may finish."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Once: finish what runs. Twice: end at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
