"""`serve` runs a server from its first byte to its end."""

import logging
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import EngineError
from octavo.metrics.http import HttpMetrics
from octavo.server.admission import Admission
from octavo.server.api_keys import load_api_keys
from octavo.server.app import create_app
from octavo.server.draining import DrainingServer
from octavo.server.http_protocol import HttpLimits, limited_protocol
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.middleware import with_middleware
from octavo.server.settings import Settings
from octavo.server.sockets import check_certificate, listening, url_of

logger = logging.getLogger(__name__)


def serve(settings: Settings, on_listening: Callable[[str], None] | None = None) -> None:
    """Listen, load the model meanwhile, serve until a signal or the engine's end.

    Raises:
        InvalidParameterError: nothing can listen there; a file that an option names cannot be used.
        OctavoError: the model could not be loaded, or the engine died; requests had to be broken off at the end.
    """
    args = settings.server
    keys = load_api_keys(args)
    check_certificate(args)
    with listening(args) as listener:
        lifecycle = EngineLifecycle(settings.engine, args)
        lifecycle.start_loading()
        metrics = HttpMetrics()
        server = make_server(create_app(lifecycle, args, metrics), settings, keys, metrics)
        lifecycle.on_end = server.stop
        (on_listening or _log_url)(url_of(listener, args))
        server.run(sockets=[listener])
    if lifecycle.failure is not None:
        raise lifecycle.failure
    if server.num_cut:
        raise EngineError(f"{server.num_cut} requests were broken off by the end of the server")


def _log_url(url: str) -> None:
    logger.info("listening on %s", url)


def make_server(app: ASGIApp, settings: Settings, keys: tuple[str, ...], metrics: HttpMetrics) -> DrainingServer:
    """Put routes, middleware and uvicorn together."""
    args = settings.server
    admission = Admission(settings.engine.max_num_seqs, args.max_waiting)
    limits = HttpLimits(
        max_header_bytes=args.max_header_bytes,
        read_timeout_s=args.read_timeout_s,
        write_timeout_s=args.write_timeout_s,
    )
    config = uvicorn.Config(
        with_middleware(app, args, keys, admission, metrics),
        loop="uvloop", http=limited_protocol(limits, metrics), ws="none", log_config=None, access_log=False,
        server_header=False, root_path=args.root_path, timeout_keep_alive=args.keep_alive_s,
        ssl_certfile=args.ssl_certfile, ssl_keyfile=args.ssl_keyfile,
    )  # fmt: skip
    return DrainingServer(config, admission, args.drain_timeout_s)
