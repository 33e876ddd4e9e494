"""Which request of the engine belongs to which client: the core knows neither requests of HTTP nor keys."""

from collections.abc import Sequence
from typing import NamedTuple

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
