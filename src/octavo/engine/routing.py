"""Routes a request to the replica with the least work before its first token.

Cost is counted in prompt tokens: those waiting at the replica, those of the request that are not known to be in its
prefix cache, and `_TOKENS_PER_REQUEST` for each unfinished request, whose steps it will share. So requests with a long
common prefix go to the same replica, until it is that much busier than others.

The cache contents of a replica are tracked, not queried: the hashes of blocks sent there, at most as many as it has
blocks, with LRU eviction as in its own pool.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.contracts.engine import EngineCoreRequest
from octavo.scheduler.block_hash import chain_hashes, request_root

_TOKENS_PER_REQUEST = 64  # cost about as much as one more row in the steps of a short output
_BLOCKS_UNTIL_KNOWN = 4096


@dataclass(kw_only=True, slots=True)
class ReplicaLoad:
    """The load of one replica, as known to the frontend."""

    num_routed: int = 0  # requests, since the start
    unfinished: dict[str, int] = field(default_factory=dict)  # request id -> prompt tokens still waiting
    num_waiting_tokens: int = 0
    prefixes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # block hashes, most recently used last
    num_blocks: int = _BLOCKS_UNTIL_KNOWN

    def count_cached(self, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, the replica has cached, as far as known."""
        return next((at for at, name in enumerate(names) if name not in self.prefixes), len(names))

    def remember(self, names: Sequence[bytes]) -> None:
        """Record that these blocks will be cached; the first of a chain outlives those after it."""
        for name in reversed(names):
            self.prefixes[name] = None
            self.prefixes.move_to_end(name)
        while len(self.prefixes) > self.num_blocks:
            self.prefixes.popitem(last=False)


class Router:
    """Tracks the load of live replicas. Not thread-safe."""

    def __init__(self, num_replicas: int, block_size: int, *, caches_prefixes: bool) -> None:
        self._block_size, self._caches_prefixes = block_size, caches_prefixes
        self._loads = {replica: ReplicaLoad() for replica in range(num_replicas)}

    @property
    def replicas(self) -> list[int]:
        """The live replicas."""
        return list(self._loads)

    def route(self, samples: Sequence[EngineCoreRequest]) -> int:
        """Choose a replica for the samples of one request, which share their prompt; count them there."""
        prompt = samples[0]
        names = self._block_hashes(prompt)
        cached = {replica: load.count_cached(names) * self._block_size for replica, load in self._loads.items()}
        num_tokens = len(prompt.prompt_token_ids)
        chosen = min(self._loads, key=lambda replica: self._cost(replica, num_tokens - cached[replica]))
        load = self._loads[chosen]
        load.num_routed += len(samples)
        load.remember(names)
        for number, sample in enumerate(samples):
            waiting = num_tokens - cached[chosen] if number == 0 else 0  # the others hit the first one's blocks
            load.unfinished[sample.request_id] = waiting
            load.num_waiting_tokens += waiting
        return chosen

    def record_admitted(self, replica: int, request_ids: Iterable[str]) -> None:
        """Record that requests no longer wait."""
        load = self._loads[replica]
        for request_id in request_ids:
            if request_id in load.unfinished:
                load.num_waiting_tokens -= load.unfinished[request_id]
                load.unfinished[request_id] = 0

    def record_finished(self, replica: int, request_ids: Iterable[str]) -> None:
        """Record that requests have finished."""
        load = self._loads[replica]
        for request_id in request_ids:
            load.num_waiting_tokens -= load.unfinished.pop(request_id, 0)

    def record_blocks(self, replica: int, num_blocks: int) -> None:
        """Record the number of blocks of a replica."""
        self._loads[replica].num_blocks = num_blocks

    def drop(self, replica: int) -> list[str]:
        """Remove a dead replica; return its unfinished requests."""
        load = self._loads.pop(replica, None)
        return list(load.unfinished) if load is not None else []

    def _cost(self, replica: int, num_own_tokens: int) -> tuple[int, int]:
        load = self._loads[replica]
        cost = load.num_waiting_tokens + num_own_tokens + _TOKENS_PER_REQUEST * len(load.unfinished)
        return cost, load.num_routed  # ties go to the one with the fewest requests so far

    def _block_hashes(self, request: EngineCoreRequest) -> list[bytes]:
        if not self._caches_prefixes:
            return []
        token_ids = np.array(request.prompt_token_ids, dtype=np.int32)
        return list(chain_hashes(request_root(request), token_ids, self._block_size))
