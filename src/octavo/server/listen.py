"""`serve` runs a server from its listening socket to its shutdown; `configure_logging` formats what it logs."""

import errno
import logging
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from octavo.errors import EngineError, InvalidParameterError
from octavo.metrics.collect import HttpMetrics
from octavo.server.args import LogFormat, LogLevel, ServerArgs
from octavo.server.engine_pool import args_of
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.settings import Settings
from octavo.server.state.folder import holding_state_dir
from octavo.server.systemd import READY, notify
from octavo.server.tenants.tenants import Tenants
from octavo.server.tracing import tracing

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


def serve(settings: Settings, announce: Callable[[str], None] = logger.info) -> None:
    """Listen, load the model in the background, serve until a signal arrives or the engine dies.

    `announce` is called when the server listens, and again when it is ready.

    Raises InvalidParameterError: the address or a file named by an option cannot be used; OctavoError: the model failed
    to load, the engine died, or requests were cancelled by the shutdown.
    """
    args = settings.server
    keys = load_api_keys(args)
    check_certificate(args)
    metrics = HttpMetrics()
    tenants = load_tenants(settings, metrics)
    lifecycle = EngineLifecycle(settings.engine, args_of(args))
    with holding_state_dir(args.state_dir), listening(args) as listener, tracing(lifecycle.served_name) as tracer:
        lifecycle.observer = tracer
        lifecycle.start_loading()
        # Importing FastAPI takes half a second: do it while the engine process imports torch.
        from octavo.server.app import create_app, make_server
        from octavo.server.kept.returning import Returning
        from octavo.server.model_switch import with_several_models

        returning = Returning(args, metrics)
        if args.also_serve or args.idle_unload_s is not None:
            app: ASGIApp = with_several_models(lifecycle, settings, metrics, returning, tenants)
        else:
            app = create_app(lifecycle, args, metrics, returning, settings.origins, tenants)
        server = make_server(app, settings, keys, metrics, tenants, tracer)
        url = url_of(listener, args)

        def on_ready(summary: str) -> None:
            announce(f"{summary}; {url}")
            notify(READY, f"STATUS={summary}")
            returning.recover(cast("ASGIApp", server.config.app))

        lifecycle.on_ready, lifecycle.on_end = on_ready, server.stop
        announce(f"listening on {url}")
        server.run(sockets=[listener])
    if lifecycle.failure is not None:
        raise lifecycle.failure
    if server.num_cut:
        raise EngineError(f"{server.num_cut} requests were cancelled by the shutdown")


def load_api_keys(args: ServerArgs) -> tuple[str, ...]:
    """Return the API keys given as options and those in the file: one per line, except blank lines and # comments."""
    if args.api_key_file is None:
        return args.api_key
    try:
        lines = Path(args.api_key_file).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("api_key_file", args.api_key_file, f"cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidParameterError("api_key_file", args.api_key_file, "contains no key")
    return (*args.api_key, *keys)


def load_tenants(settings: Settings, metrics: HttpMetrics) -> Tenants | None:
    """Return those of the file of named keys; None: there is no file. Raises InvalidParameterError."""
    args = settings.server
    if args.keys_file is None:
        return None
    main_name = (*args.served_model_name, settings.engine.model_name)[0]
    return Tenants(args.keys_file, settings.engine.max_num_seqs, main_name, metrics)


@contextmanager
def listening(args: ServerArgs) -> Generator[socket.socket, None, None]:
    """Yield a listening socket: clients may connect while the rest is still being imported."""
    listener = _unix_socket(args.uds) if args.uds is not None else _tcp_socket(args.host, args.port)
    listener.listen(_BACKLOG)
    try:
        yield listener
    finally:
        listener.close()
        if args.uds is not None:
            Path(args.uds).unlink(missing_ok=True)


def url_of(listener: socket.socket, args: ServerArgs) -> str:
    if args.uds is not None:
        return f"unix:{args.uds}"
    scheme = "https" if args.ssl_certfile is not None else "http"
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}{args.root_path}"


def check_certificate(args: ServerArgs) -> None:
    """Load the certificate and key, so that errors show before the model is loaded."""
    if args.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            files = f"{args.ssl_certfile} with {args.ssl_keyfile}"
            raise InvalidParameterError("ssl_certfile", files, f"cannot be used: {error}") from error


def _tcp_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the first address of `host`."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        hint = "; another port is --port N, any free one --port 0" if error.errno == errno.EADDRINUSE else ""
        limit = f"cannot listen there: {error.strerror or error}{hint}"
        raise InvalidParameterError("port", f"{host}:{port}", limit) from error
    return listener


def _unix_socket(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_if_deserted(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise InvalidParameterError("uds", path, f"cannot listen there: {error}") from error
    return listener


def _remove_if_deserted(path: str) -> None:
    """Remove the socket of a crashed server; never one in use, or another file."""
    if not Path(path).exists() or not stat.S_ISSOCK(Path(path).stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()


class JsonFormatter(logging.Formatter):
    """Keys `time` (UTC), `level`, `logger`, `message`, `error` with a traceback, and the record's own `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime(_TIME_FORMAT, time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        line.update(getattr(record, "facts", {}))
        return msgspec.json.encode(line).decode()


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Send all logs to standard error in this format; called once, by the program."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", _TIME_FORMAT)
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Logged with the client's address by server/http/protocol.py.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != "Invalid HTTP request received.")
    if level == "info":  # uvicorn's start and stop messages, which we log ourselves
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
