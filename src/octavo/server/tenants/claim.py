"""Whose request of the engine is whose: the core knows neither requests of HTTP nor keys. And what a key gives it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from octavo.sampling_params import RequestPriority
from octavo.server.http.exchange import Exchange
from octavo.server.openai.embeddings import VectorsRequest
from octavo.server.openai.reply_stream import ReplyStream
from octavo.server.tenants.tenant import Tenant

_MAX_NAMES = 8192  # requests; older ones have ended, or are shown without a name


class ClientName(NamedTuple):
    """Who asked."""

    request_id: str  # the one in the reply's header X-Request-Id
    tenant: str | None  # the name of the key; None: the server has no tenants


class RequestNames:
    """The names of clients by the core's ids. Owned by the event loop."""

    def __init__(self) -> None:
        self._names: dict[str, ClientName] = {}

    def add(self, core_ids: Sequence[str], name: ClientName) -> None:
        """Remember who asked for these samples; the oldest are forgotten."""
        self._names.update(dict.fromkeys(core_ids, name))
        while len(self._names) > _MAX_NAMES:
            del self._names[next(iter(self._names))]

    def get(self, core_id: str) -> ClientName | None:
        return self._names.get(core_id)


def claim(exchange: Exchange, reply: ReplyStream[Any], names: RequestNames) -> None:
    """Remember whose answer this is; give its samples, which have not started, their tenant's priority and salt.

    A client may ask for less than its key has, and not for more.
    """
    tenant = exchange.tenant
    names.add(reply.core_ids, ClientName(exchange.request_id, None if tenant is None else tenant.name))
    if tenant is None:
        return
    priority = _priority(exchange, tenant, reply.priority)
    reply.change_samples(priority, _salt(tenant, reply.cache_salt))


def claim_vectors(exchange: Exchange, request: VectorsRequest) -> None:
    """Give a request for numbers the same; a priority that there is not stays, to be refused."""
    tenant, asked = exchange.tenant, RequestPriority.NORMAL if request.priority is None else request.priority
    if tenant is None or asked not in list(RequestPriority):
        return
    request.priority = _priority(exchange, tenant, asked)
    request.cache_salt = _salt(tenant, request.cache_salt) or request.cache_salt


def _priority(exchange: Exchange, tenant: Tenant, asked: int) -> int:
    own = tenant.spec.request_priority if exchange.engine_priority is None else exchange.engine_priority
    return min(RequestPriority.BACKGROUND, own + max(0, asked - RequestPriority.NORMAL))


def _salt(tenant: Tenant, given: str | None) -> str | None:
    return f"tenant {tenant.name} {given or ''}" if tenant.spec.own_prefix_cache else None
