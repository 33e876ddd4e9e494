"""Fair shares of the engine: which tenant's request goes on to it next.

The engine takes requests as they come, so whoever sends most would get most. Here a request waits with its tenant's
others, and goes on when the engine has a row for it; next is the tenant that has had the fewest virtual tokens (Sheng
et al., "Fairness in Serving Large Language Models", OSDI 2024): tokens of prompts, twice those of outputs, by weight.
Some rows stay free for tenants that have none, so that one that comes does not wait for the end of another's answer.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from octavo.sampling_params import RequestPriority
from octavo.server.http.exchange import Exchange
from octavo.server.http.sse import wait_for_disconnect
from octavo.server.tenants.tenant import Place, Tenant

_RATE_WINDOW = 32  # requests that have ended, of which the expected wait is made
_RESERVED = 4  # at most one row in so many is kept free for those who have none


class FairShares:
    """Owned by the event loop. `capacity`: samples that the engine runs at once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tenants: list[Tenant] = []
        self._ends_s: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._turns: dict[Place, asyncio.Future[None]] = {}  # of the waiting ones

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Take over who there is; those who are gone remain until their last request has ended."""
        new = list(tenants)
        self._tenants = new + [each for each in self._tenants if each.is_active and each not in new]
        self._grant()

    @asynccontextmanager
    async def turn(self, tenant: Tenant, exchange: Exchange) -> AsyncGenerator[bool, None]:
        """Wait until the request may go on; it runs during the block. False: its client has left meanwhile."""
        place = Place(exchange)
        if not any(each.waiting for each in self._tenants):  # the rate of before says nothing about a queue
            self._ends_s.clear()
        if not tenant.is_active:
            others = [each.virtual_tokens for each in self._tenants if each.is_active]
            tenant.lift(min(others, default=0.0))
        tenant.waiting.append(place)
        granted = self._turns[place] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            if not granted.done() and not await _is_here_until(granted, exchange):
                yield False
                return
            exchange.engine_priority = self._priority(tenant)
            yield True
        finally:
            if place in tenant.running:
                tenant.settle(place)
                self._ends_s.append(time.monotonic())
            else:
                tenant.waiting.remove(place)
                del self._turns[place]
            self._grant()

    def _grant(self) -> None:
        """Let requests go on as long as there is room for one."""
        while (tenant := self._next()) is not None:
            place = tenant.waiting.popleft()
            tenant.running[place] = None
            self._turns.pop(place).set_result(None)

    def _next(self) -> Tenant | None:
        num_running = {tenant: tenant.num_running for tenant in self._tenants}
        total = sum(num_running.values())
        if total >= self._capacity:
            return None
        fitting = [each for each in self._tenants if each.waiting and self._has_room(each, num_running, total)]
        return min(fitting, key=lambda tenant: tenant.virtual_tokens, default=None)

    def _has_room(self, tenant: Tenant, num_running: dict[Tenant, int], total: int) -> bool:
        own, limit = num_running[tenant], tenant.spec.max_running
        if limit is not None and own >= limit:
            return False
        return own == 0 or total < self._capacity - self._num_reserved(num_running)

    def _num_reserved(self, num_running: dict[Tenant, int]) -> int:
        """Return how many rows are kept for those who have none; one row cannot be kept free."""
        num_idle = sum(not count for count in num_running.values())
        return min(num_idle, max(1, self._capacity // _RESERVED)) if self._capacity > 1 else 0

    def _priority(self, tenant: Tenant) -> int:
        """Return the class of a request that goes on: one better while its tenant has less than an equal share."""
        num_active = sum(each.is_active for each in self._tenants)
        is_below = num_active > 1 and tenant.num_running * num_active <= sum(each.num_running for each in self._tenants)
        return max(RequestPriority.CRITICAL, tenant.spec.request_priority - is_below)

    def expected_share(self, tenant: Tenant) -> int:
        """Return among how many tenants the engine is shared while this one waits."""
        return sum(each.is_active for each in self._tenants if each is not tenant) + 1

    def describe_waiting(self) -> list[dict[str, Any]]:
        """Describe the requests that wait here, for the page."""
        total = sum(each.num_running for each in self._tenants)
        wait_s = None  # of one place in a queue
        if len(self._ends_s) > 1:
            wait_s = (time.monotonic() - self._ends_s[0]) / len(self._ends_s)
        found: list[dict[str, Any]] = []
        for tenant in self._tenants:
            limit, num_active = tenant.spec.max_running, self.expected_share(tenant)
            if limit is not None and tenant.num_running >= limit:
                reason = "tenant limit"
            else:
                is_over = tenant.num_running * num_active >= total and len(self._tenants) > 1
                reason = "fair share" if is_over else "rows"
            found += [
                {
                    "id": None,
                    "name": place.exchange.request_id,
                    "tenant": tenant.name,
                    "status": "waiting",
                    "reason": reason,
                    "num_ahead": ahead,
                    "wait_s": None if wait_s is None else (ahead + 1) * num_active * wait_s,
                    "arrival_s": place.arrived_s,
                    "priority": tenant.spec.request_priority,
                    "num_prompt": None,
                }
                for ahead, place in enumerate(tenant.waiting)
            ]
        return found

    def describe_tenants(self) -> list[dict[str, Any]]:
        """Describe who uses how much, for the page."""
        tokens = {each: each.usage.prompt_tokens + each.usage.output_tokens for each in self._tenants}
        total = sum(tokens.values())
        return [
            {
                "name": each.name,
                "running": each.num_running,
                "waiting": len(each.waiting),
                "requests": each.usage.requests,
                "prompt_tokens": each.usage.prompt_tokens,
                "output_tokens": each.usage.output_tokens,
                "refused": each.usage.refused,
                "share": tokens[each] / total if total else 0.0,
            }
            for each in self._tenants
        ]


async def _is_here_until(granted: "asyncio.Future[None]", exchange: Exchange) -> bool:
    """Wait for a turn; False if the client leaves before it."""
    leaving = asyncio.ensure_future(wait_for_disconnect(exchange.receive))
    try:
        await asyncio.wait((granted, leaving), return_when=asyncio.FIRST_COMPLETED)
        return granted.done()
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
