"""The engine core in a child process: msgpack messages over two ZMQ sockets, one per direction.

The child runs `octavo.engine.core_proc`, so no program needs a `__main__` guard. It reads its configuration
from standard input, and that pipe stays open: when it closes, the parent has exited and the child exits, too.

Under data parallelism there are several: replicas of the model, each with its own scheduler and KV cache. The requests
of a replica that dies end with `EngineDeadError`; the others continue. The engine is dead when the last replica is.
"""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zmq

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import (
    AddRequests,
    CallMethod,
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    SchedulerStats,
    ToCore,
)
from octavo.contracts.frames import encode_frames
from octavo.device.cgroups import usable_cores
from octavo.engine.child_core import ChildCore
from octavo.errors import EngineDeadError, OctavoError, anew
from octavo.scheduler.block_manager import chain_hashes, root_hash
from octavo.working_folder import child_command

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # how often a waiting receiver checks that the children are alive
_UNHEARD_S = 0.01  # between attempts to send to a child that has just died
_TOKENS_PER_REQUEST = 64  # cost about as much as one more row in the steps of a short output
_BLOCKS_UNTIL_KNOWN = 4096


class ProcessClient:
    """Implements `EngineCoreClient`. All children load at the same time, each with its share of the host's cores.

    Whoever waits for something receives for all: the thread that gets outputs, or until there is one, any other.
    """

    # Followed by the prefix of the addresses of the sockets.
    command: Sequence[str] = child_command("octavo.engine.core_proc")

    def __init__(self, config: EngineConfig) -> None:
        """Start the children. Raises EngineDeadError if one cannot be started; the others have been closed then."""
        num_replicas = config.parallel.data_parallel_size
        self._sockets = zmq.Context()
        self._poller = zmq.Poller()
        self._receiving = threading.Lock()  # held while messages are received
        self._next_look_s = 0.0
        self._receiver: int | None = None  # the thread that last got outputs
        self._arrived: deque[tuple[int, EngineCoreOutputs | None]] = deque()  # by replica; None: it died
        self._replicas: list[ChildCore] = []
        self._lock = threading.Lock()  # guards the following two: one thread adds while another gets outputs
        cache = config.cache
        self._router = Router(
            num_replicas, cache.block_size, caches_prefixes=cache.enable_prefix_caching and num_replicas > 1
        )
        self._stats: dict[int, SchedulerStats] = {}  # the latest of each replica
        if num_replicas > 1:
            config = replace(config, threads=max(1, (config.threads or usable_cores()) // num_replicas))
        try:
            for number in range(num_replicas):
                deliver = partial(self._deliver, number)
                self._replicas.append(ChildCore(self.command, config, self._sockets, deliver))
                self._poller.register(self._replicas[-1].from_core, zmq.POLLIN)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise EngineDeadError(f"the engine process could not be started: {error}") from error
            raise

    def _deliver(self, number: int, outputs: EngineCoreOutputs | None) -> None:
        self._arrived.append((number, outputs))

    @property
    def pids(self) -> list[int]:
        """The process id of each replica."""
        return [replica.child.pid for replica in self._replicas]

    def load(self) -> CoreReady:
        """See `EngineCoreClient.load`: all replicas. Raises what the first one raised that failed."""
        while any(replica.ready is None for replica in self._replicas):
            for replica in self._replicas:
                if replica.death is not None:
                    raise anew(replica.death)
            self._receive(_POLL_S)
        ready = [replica.ready for replica in self._replicas if replica.ready is not None]
        return CoreReady(profile=ready[0].profile, kv_tokens=sum(each.kv_tokens for each in ready))

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """See `EngineCoreClient.add`. Samples of one request stay together."""
        while True:
            with self._lock:
                alive = [number for number in self._router.replicas if self._replicas[number].death is None]
                if not alive:
                    raise self._last_death()
                number = self._router.route(requests, alive)
            try:
                return self._send(number, AddRequests(requests=requests))
            except EngineDeadError:  # died just now: `get_outputs` ends its requests; these did not reach it
                with self._lock:
                    self._router.withdraw(number, [request.request_id for request in requests])

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            by_replica = self._router.by_replica(request_ids)
        for number, ids in by_replica.items():
            if self._replicas[number].death is None:
                self._send(number, CallMethod(call_id=None, method="abort", arguments=[ids]))

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        self._receiver = threading.get_ident()
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._arrived:
            if not self._router.replicas:
                raise self._last_death()
            left_s = end_s - time.monotonic()
            self._receive(min(max(left_s, 0.0), _POLL_S))
            if left_s <= 0.0 and not self._arrived:
                return None
        number, outputs = self._arrived.popleft()
        if outputs is None:
            return self._end_replica(number)
        with self._lock:
            self._router.record(number, outputs)
        if outputs.stats is not None:
            self._stats[number] = outputs.stats
        return msgspec.structs.replace(outputs, replica=number) if number else outputs

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """See `EngineCoreClient.call`: all live replicas, concurrently."""
        calls = []
        for number, replica in enumerate(self._replicas):
            if replica.death is None:
                call, message = replica.new_call(method, arguments)
                self._send(number, message)
                calls.append(call)
        if not calls:
            raise self._last_death()
        while self._receiver in (None, threading.get_ident()) and not all(call.done() for call in calls):
            self._receive(_POLL_S)  # no other thread will
        return [call.result() for call in calls]

    def close(self) -> None:
        # All at the same time, but without threads: none can be started any more when the interpreter ends.
        for replica in self._replicas:
            replica.begin_close()
        for replica in self._replicas:
            replica.finish_close()
        with self._receiving:
            self._sockets.destroy(linger=0)

    def _send(self, number: int, message: ToCore) -> None:
        frames = encode_frames(message)
        while not self._replicas[number].try_send(frames):
            self._receive(_UNHEARD_S)  # the child has exited: a blocking send would wait forever

    def _receive(self, timeout_s: float) -> None:
        """Receive what has come, waiting for the first message at most `timeout_s`; look from time to time who died."""
        with self._receiving:
            if self._sockets.closed:
                return
            ready = dict(self._poller.poll(int(timeout_s * 1e3)))
            for replica in self._replicas:
                if replica.from_core in ready:
                    replica.receive()
            if not ready or time.monotonic() >= self._next_look_s:
                self._next_look_s = time.monotonic() + _POLL_S
                for replica in self._replicas:
                    replica.notice_exit()

    def _end_replica(self, number: int) -> EngineCoreOutputs:
        """Return outputs that end a dead replica's unfinished requests. Raises if it was the last one."""
        with self._lock:
            lost = self._router.drop(number)
            num_left = len(self._router.replicas)
        if not num_left:
            raise self._last_death()
        error = f"replica {number}: {self._replicas[number].death}"
        logger.error("%s; %d of its requests end, %d replicas remain", error, len(lost), num_left)
        end = FinishedRequest(finish_reason="error", error=error, error_type=EngineDeadError.__name__)
        return EngineCoreOutputs(
            epoch=0,
            finished=dict.fromkeys(lost, end),
            stats=self._stats.get(number, SchedulerStats()).ended(),
            replica=number,
        )

    def _last_death(self) -> OctavoError:
        deaths = [replica.death for replica in self._replicas]
        if len(deaths) == 1 and deaths[0] is not None:
            return anew(deaths[0])
        each = [f"replica {number}: {death}" for number, death in enumerate(deaths)]
        return EngineDeadError("all replicas are gone: " + "; ".join(each))


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


class Router:
    """Routes a request to the replica with the least work before its first token. Not thread-safe.

    Cost is counted in prompt tokens: those waiting at the replica, those of the request that are not known to be in its
    prefix cache, and `_TOKENS_PER_REQUEST` for each unfinished request, whose steps it will share. So requests with a
    long common prefix go to the same replica, until it is that much busier than others.

    The cache contents of a replica are tracked, not queried: the hashes of blocks sent there, at most as many as it has
    blocks, with LRU eviction as in its own pool.
    """

    def __init__(self, num_replicas: int, block_size: int, *, caches_prefixes: bool) -> None:
        self._block_size, self._caches_prefixes = block_size, caches_prefixes
        self._loads = {replica: ReplicaLoad() for replica in range(num_replicas)}

    @property
    def replicas(self) -> list[int]:
        """Those that have not been dropped."""
        return list(self._loads)

    def by_replica(self, request_ids: Sequence[str]) -> dict[int, list[str]]:
        """Return the unfinished among these requests by their replica."""
        loads = self._loads.items()
        found = ((replica, [each for each in request_ids if each in load.unfinished]) for replica, load in loads)
        return {replica: ids for replica, ids in found if ids}

    def route(self, samples: Sequence[EngineCoreRequest], among: Sequence[int]) -> int:
        """Choose one of these replicas for the samples of a request, which share their prompt; count them there."""
        prompt = samples[0]
        names: list[bytes] = []  # of its blocks
        if self._caches_prefixes:
            token_ids = np.array(prompt.prompt_token_ids, dtype=np.int32)
            names = list(chain_hashes(root_hash(prompt.prefix_keys), token_ids, self._block_size))
        cached = {replica: self._loads[replica].count_cached(names) * self._block_size for replica in among}
        num_tokens = len(prompt.prompt_token_ids)

        def cost(replica: int) -> tuple[int, int]:
            load = self._loads[replica]
            own_tokens = num_tokens - cached[replica]
            total = load.num_waiting_tokens + own_tokens + _TOKENS_PER_REQUEST * len(load.unfinished)
            return total, load.num_routed  # ties go to the one with the fewest requests so far

        chosen = min(among, key=cost)
        load = self._loads[chosen]
        load.num_routed += len(samples)
        for name in reversed(names):  # the first of a chain outlives those after it
            load.prefixes[name] = None
            load.prefixes.move_to_end(name)
        while len(load.prefixes) > load.num_blocks:
            load.prefixes.popitem(last=False)
        for number, sample in enumerate(samples):
            waiting = num_tokens - cached[chosen] if number == 0 else 0  # the others hit the first one's blocks
            load.unfinished[sample.request_id] = waiting
            load.num_waiting_tokens += waiting
        return chosen

    def record(self, replica: int, outputs: EngineCoreOutputs) -> None:
        """Record which requests no longer wait, which have finished, and how many blocks the replica has."""
        load = self._loads.get(replica)
        if load is None:
            return
        for request_id in outputs.admitted:
            if request_id in load.unfinished:
                load.num_waiting_tokens -= load.unfinished[request_id]
                load.unfinished[request_id] = 0
        self.withdraw(replica, outputs.finished)
        if outputs.stats is not None:
            load.num_blocks = outputs.stats.num_blocks

    def withdraw(self, replica: int, request_ids: Iterable[str]) -> None:
        """Forget requests that have finished, or did not reach the replica."""
        load = self._loads[replica]
        for request_id in request_ids:
            load.num_waiting_tokens -= load.unfinished.pop(request_id, 0)

    def drop(self, replica: int) -> list[str]:
        """Remove a dead replica; return its unfinished requests."""
        load = self._loads.pop(replica, None)
        return list(load.unfinished) if load is not None else []
