"""`Tenants`: finds the tenant of a key, and reads the file of keys again when it is told to."""

import hashlib
import hmac
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from octavo.errors import InvalidParameterError
from octavo.metrics.collect import HttpMetrics
from octavo.server.http.exchange import Exchange
from octavo.server.tenants.keys_file import TenantSpec, read_keys_file
from octavo.server.tenants.shares import FairShares
from octavo.server.tenants.tenant import Tenant

logger = logging.getLogger(__name__)


class _Named(msgspec.Struct):
    model: Any = None


_peek = msgspec.json.Decoder(_Named).decode


class Tenants:
    """All tenants of a server. Owned by the event loop."""

    def __init__(self, path: str, capacity: int, main_name: str, metrics: HttpMetrics) -> None:
        """Read the file. Raises InvalidParameterError."""
        self._path, self._main_name, self._metrics = path, main_name, metrics
        self.shares = FairShares(capacity)
        self._tenants: dict[str, Tenant] = {}  # by name
        self._by_digest: dict[bytes, Tenant] = {}
        self._take(read_keys_file(path))

    def reload(self) -> None:
        """Read the file again. If it is wrong, all stays as it is, and the log says why."""
        try:
            specs = read_keys_file(self._path)
        except InvalidParameterError as error:
            logger.error("the keys stay as they are: %s", error)
            return
        self._take(specs)
        logger.info("keys read again: %d tenants", len(specs))

    def _take(self, specs: list[TenantSpec]) -> None:
        before, self._tenants = self._tenants, {}
        for spec in specs:
            tenant = before.get(spec.name) or Tenant(spec, usage=self._metrics.by_key[spec.name])
            tenant.spec = spec
            self._tenants[spec.name] = tenant
        self._by_digest = {digest: self._tenants[spec.name] for spec in specs for digest in spec.digests}
        self.shares.set_tenants(self._tenants.values())

    def find(self, digest: bytes) -> Tenant | None:
        """Return the tenant whose key has this SHA-256. Compares with all keys, so that timing tells nothing."""
        found = None
        for known, tenant in self._by_digest.items():
            if hmac.compare_digest(digest, known):
                found = tenant
        return found

    def check_body(self, exchange: Exchange) -> None:
        """Check the model that a request names. Raises ApiError, 403."""
        assert exchange.tenant is not None
        if exchange.tenant.spec.models is None:
            return
        try:
            model = _peek(exchange.body or b"{}").model
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # the route says what is wrong with the body
        exchange.tenant.check_model(model if isinstance(model, str) else None, self._main_name)

    def turn(self, exchange: Exchange) -> AbstractAsyncContextManager[bool]:
        """See `FairShares.turn`."""
        assert exchange.tenant is not None
        return self.shares.turn(exchange.tenant, exchange)

    def describe(self) -> Mapping[str, Any]:
        """What the page shows: requests that wait here, and who uses how much."""
        return {"requests": self.shares.describe_waiting(), "tenants": self.shares.describe_tenants()}


def owner_of(tenant: Tenant) -> str:
    """Return the owner of what a tenant stores, whichever of its keys it uses."""
    return hashlib.sha256(b"tenant " + tenant.name.encode()).hexdigest()
