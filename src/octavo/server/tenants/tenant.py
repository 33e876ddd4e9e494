"""One tenant: its limits, what it has used, and its requests that wait and run."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from octavo.metrics.collect import KeyUsage
from octavo.server.http.errors import ApiError
from octavo.server.http.exchange import Exchange
from octavo.server.tenants.keys_file import TenantSpec

_BYTES_PER_TOKEN = 4  # of a body, until its tokens are counted
_OUTPUT_COST = 2.0  # virtual tokens of an output token: it takes a step, which prompt tokens share
_MINUTE_S = 60.0


class Rate:
    """So many per minute, in a row at most as many as in a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._level, self._at_s = clock, math.inf, clock()

    def wait_s(self, per_minute: float, amount: float = 1.0) -> float:
        """Return how long until `amount` is there; 0: it is. One larger than a minute's is there when a minute's is."""
        now_s = self._clock()
        self._level = min(per_minute, self._level + (now_s - self._at_s) * per_minute / _MINUTE_S)
        self._at_s = now_s
        missing = min(amount, per_minute) - self._level
        return max(0.0, missing) * _MINUTE_S / per_minute

    def take(self, amount: float = 1.0) -> None:
        """Use it up; below nothing, where more was used than was known before."""
        self._level -= amount


@dataclass(slots=True, eq=False)
class Place:
    """A request in the queue of its tenant, or running."""

    exchange: Exchange
    arrived_s: float = field(default_factory=time.time)

    @property
    def num_samples(self) -> int:
        return max(1, self.exchange.num_samples)

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of prompt and output so far; of the prompt a guess, until it is tokenized."""
        if self.exchange.count_tokens is None:
            return len(self.exchange.body) // _BYTES_PER_TOKEN, 0
        return self.exchange.count_tokens()


@dataclass(slots=True, eq=False)
class Tenant:
    """Owned by the event loop. `spec` may change while requests run; what was used stays."""

    spec: TenantSpec
    clock: Callable[[], float] = time.monotonic
    usage: KeyUsage = field(default_factory=KeyUsage)
    waiting: deque[Place] = field(default_factory=deque)  # oldest first
    running: dict[Place, None] = field(default_factory=dict)
    requests: Rate = field(init=False)
    tokens: Rate = field(init=False)
    _settled: float = 0.0  # virtual tokens of requests that have ended, by weight

    def __post_init__(self) -> None:
        self.requests, self.tokens = Rate(self.clock), Rate(self.clock)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def num_running(self) -> int:
        return sum(place.num_samples for place in self.running)

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def virtual_tokens(self) -> float:
        """What it has had, in tokens by weight: who has had least is next."""
        return self._settled + sum(map(self._cost, self.running))

    def lift(self, floor: float) -> None:
        """Count from the present of the others: who has been away has saved up nothing."""
        self._settled = max(self._settled, floor)

    def settle(self, place: Place) -> None:
        """A running request has ended."""
        num_prompt, num_output = place.count_tokens()
        self._settled += self._cost(place)
        del self.running[place]
        self.tokens.take(num_prompt + num_output)
        self.usage.prompt_tokens += num_prompt
        self.usage.output_tokens += num_output

    def _cost(self, place: Place) -> float:
        num_prompt, num_output = place.count_tokens()
        return (num_prompt + _OUTPUT_COST * num_output) / self.spec.weight

    def check_rates(self) -> None:
        """Count a request that has come. Raises ApiError, 429: there are too many, or too many tokens."""
        for rate, per_minute, unit in (
            (self.requests, self.spec.requests_per_minute, "requests"),
            (self.tokens, self.spec.tokens_per_minute, "tokens"),
        ):
            if per_minute is not None and (wait_s := rate.wait_s(per_minute)) > 0.0:
                text = f"The key {self.name!r} has used its {per_minute:g} {unit} per minute."
                after = {"Retry-After": str(math.ceil(wait_s))}
                raise ApiError(429, text, code="rate_limit_exceeded", headers=after)
        if self.spec.requests_per_minute is not None:
            self.requests.take()
        self.usage.requests += 1

    def check_batches(self, path: str) -> None:
        """Raise ApiError, 403, for a batch of a key that may not use all models: its lines are not looked at."""
        if self.spec.models is not None and path.startswith("/v1/batches"):
            text = f"The key {self.name!r} may use some models only, and so make no batches."
            raise ApiError(403, text, code="model_not_allowed")

    def check_model(self, name: str | None, main_name: str) -> None:
        """Raise ApiError, 403, unless the key may use the model that a request names; without a name, the main one."""
        asked, allowed = name or main_name, self.spec.models
        if allowed is not None and not any(fnmatchcase(asked, pattern) for pattern in allowed):
            text = f"The key {self.name!r} may not use the model {asked[:100]!r}. It may use: {', '.join(allowed)}."
            raise ApiError(403, text, param="model", code="model_not_allowed")
