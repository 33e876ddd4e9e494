"""`serve` runs a server from its first byte to its end."""

import logging
from collections.abc import Callable

from octavo.errors import EngineError
from octavo.metrics.http import HttpMetrics
from octavo.server.api_keys import load_api_keys
from octavo.server.lifecycle import EngineLifecycle
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
        # Imported here: FastAPI, half a second of it, while the engine's process imports torch.
        from octavo.server.app import create_app
        from octavo.server.assembly import make_server

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
