"""What a request's samples get from the key that it came with."""

from typing import Any

from octavo.sampling_params import RequestPriority
from octavo.server.exchange import Exchange
from octavo.server.openai.reply_stream import ReplyStream
from octavo.server.ui.names import ClientName, RequestNames


def claim(exchange: Exchange, reply: ReplyStream[Any], names: RequestNames) -> None:
    """Remember whose answer this is; give its samples, which have not started, their tenant's priority and salt.

    A client may ask for less than its key has, and not for more.
    """
    tenant = exchange.tenant
    names.add(reply.core_ids, ClientName(exchange.request_id, None if tenant is None else tenant.name))
    if tenant is None:
        return
    asked = reply.priority - RequestPriority.NORMAL
    own = tenant.spec.request_priority if exchange.engine_priority is None else exchange.engine_priority
    priority = min(RequestPriority.BACKGROUND, own + max(0, asked))
    salt = None
    if tenant.spec.own_prefix_cache:
        salt = f"tenant {tenant.name} {reply.cache_salt or ''}"
    reply.change_samples(priority, salt)
