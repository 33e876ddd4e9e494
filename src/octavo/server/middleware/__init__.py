"""What stands between the connection and the routes: pure ASGI, one concern per file."""

from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from octavo.metrics.http import HttpMetrics
from octavo.server.admission import Admission
from octavo.server.args import ServerArgs
from octavo.server.middleware.admission import AdmissionMiddleware
from octavo.server.middleware.auth import ApiKeyMiddleware
from octavo.server.middleware.body import BodyMiddleware
from octavo.server.middleware.deadline import DeadlineMiddleware
from octavo.server.middleware.exchange import ExchangeMiddleware

EXPOSED_HEADERS = ("X-Request-Id", "Retry-After")


def with_middleware(
    app: ASGIApp, args: ServerArgs, keys: Iterable[str], admission: Admission, metrics: HttpMetrics
) -> ASGIApp:
    """Wrap the routes. From the outside: id and log, CORS, key, admission, deadline, body."""
    app = BodyMiddleware(app, args.max_body_bytes, metrics)
    app = DeadlineMiddleware(app, args.request_timeout_s, metrics)
    app = AdmissionMiddleware(app, admission, metrics)
    app = ApiKeyMiddleware(app, keys, metrics)
    if args.cors_allow_origins:  # outside the keys: a browser asks first without one
        app = CORSMiddleware(
            app,
            allow_origins=args.cors_allow_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    return ExchangeMiddleware(app, metrics, logs_access=args.access_log)
