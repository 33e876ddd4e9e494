"""What a request's samples get from the key that it came with."""

from typing import Any

from octavo.sampling_params import RequestPriority
from octavo.server.http.exchange import Exchange
from octavo.server.openai.embeddings import VectorsRequest
from octavo.server.openai.reply_stream import ReplyStream
from octavo.server.tenants.tenant import Tenant
from octavo.server.ui.names import ClientName, RequestNames


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
