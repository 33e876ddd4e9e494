"""Routes, middleware and uvicorn, put together."""

import uvicorn
from starlette.types import ASGIApp

from octavo.metrics.http import HttpMetrics
from octavo.server.admission import Admission
from octavo.server.draining import DrainingServer
from octavo.server.http_protocol import HttpLimits, limited_protocol
from octavo.server.middleware import with_middleware
from octavo.server.settings import Settings


def make_server(app: ASGIApp, settings: Settings, keys: tuple[str, ...], metrics: HttpMetrics) -> DrainingServer:
    """Return a server of the application that is yet to run."""
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
