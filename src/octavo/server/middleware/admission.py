"""Gives each request that asks for work a ticket, or turns it away; tells load balancers when the server drains."""

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.metrics.http import HttpMetrics
from octavo.server.admission import Admission, draining
from octavo.server.errors import ApiError
from octavo.server.exchange import Exchange
from octavo.server.middleware.replies import OPEN_PATHS, asks_for_work, refuse, route_path, send_json


class AdmissionMiddleware:
    """Stands before the body is read, so that a refusal costs nothing."""

    def __init__(self, app: ASGIApp, admission: Admission, metrics: HttpMetrics) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not asks_for_work(scope):
            if scope["type"] == "http" and self._admission.is_draining and route_path(scope) in OPEN_PATHS:
                error = draining()
                await send_json(send, {"status": "draining", "error": error.detail}, error.status, error.headers)
            else:
                await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        try:
            ticket = self._admission.admit(exchange.end_now)
        except ApiError as error:
            await refuse(send, error, self._metrics)
            return
        with ticket:
            exchange.ticket = ticket
            await self._app(scope, receive, send)
