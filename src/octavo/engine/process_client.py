"""The engine core in a child process: msgpack messages over two ZMQ sockets, one per direction.

The child runs `octavo.engine.core_proc`, so no program needs a `__main__` guard. It reads its configuration
from standard input, and that pipe stays open: when it closes, the parent has exited and the child exits, too.

Under data parallelism there are several: replicas of the model, each with its own scheduler and KV cache. A core that
dies, or makes no progress with the requests it has, is replaced. Its requests go on in the one that takes its place, or
in another replica (`Supervisor`). The engine is dead when cores die again and again before they have computed anything.
"""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
)
from octavo.device.cgroups import usable_cores
from octavo.engine.child_core import ChildCore
from octavo.engine.supervisor import Supervisor
from octavo.errors import EngineDeadError, OctavoError, anew
from octavo.scheduler.block_manager import chain_hashes, root_hash
from octavo.working_folder import child_command

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # how often a waiting receiver checks that the children are alive
_FIRST_PAUSE_S = 0.5  # after a core that could not even begin; then each time twice as long, but at most
_LONGEST_PAUSE_S = 10.0
_STANDBY_PAUSE_S = 2.0  # before the next one loads: the requests that go on come first
_SPARE_PAUSE_S = 10.0  # from a start to its spare process: programs that end soon need none
_TOTALS = ("stats", "spec_decode", "expert_load")  # fields of outputs that count since the start of a core
_TOKENS_PER_REQUEST = 64  # cost about as much as one more row in the steps of a short output
_BLOCKS_UNTIL_KNOWN = 4096


@dataclass(slots=True, eq=False)
class Replica:
    """One replica of the model: the core that computes it now, and what its earlier ones have left."""

    number: int
    core: ChildCore
    num_failures: int = 0  # cores in a row that have computed nothing
    start_s: float | None = None  # when the next core is due; inf: never; None: there is one
    totals: dict[str, Any] = field(default_factory=dict)  # of all cores, by the fields of outputs that are totals
    ended: dict[str, Any] = field(default_factory=dict)  # of cores that have died

    @property
    def is_ready(self) -> bool:
        return self.core.ready is not None and self.core.death is None

    def add_totals(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Return a core's outputs with the replica's number, and with the totals of the cores before it."""
        for name in _TOTALS:
            if (value := getattr(outputs, name)) is not None:
                self.totals[name] = type(value).sum([value, self.ended[name]]) if name in self.ended else value
        if not self.ended:
            return msgspec.structs.replace(outputs, replica=self.number) if self.number else outputs
        known = {name: self.totals[name] for name in _TOTALS if getattr(outputs, name) is not None}
        return msgspec.structs.replace(outputs, replica=self.number, **known)

    def end_core(self) -> SchedulerStats:
        """The core has died; return what remains of its statistics."""
        stats: SchedulerStats = self.totals.get("stats", SchedulerStats()).ended()
        self.totals["stats"] = stats
        self.ended = dict(self.totals)
        return stats


class ProcessClient:
    """Implements `EngineCoreClient`. All children load at the same time, each with its share of the host's cores.

    Whoever waits for something receives for all: the thread that gets outputs, or until there is one, any other.
    """

    # Followed by the prefix of the addresses of the sockets, and the descriptor of `BegunRequests`.
    command: Sequence[str] = child_command("octavo.engine.core_proc")

    def __init__(self, config: EngineConfig) -> None:
        """Start the children. Raises EngineDeadError if one cannot be started; the others have been closed then."""
        num_replicas = config.parallel.data_parallel_size
        self._sockets = zmq.Context()
        self._poller = zmq.Poller()
        self._receiving = threading.Lock()  # held while messages are received
        self._next_look_s = 0.0
        self._receiver: int | None = None  # the thread that last got outputs
        self._arrived: deque[EngineCoreOutputs] = deque()
        self._replicas: list[Replica] = []
        self._standby: ChildCore | None = None  # a core without requests; or a process without a core
        self._standby_due_s = math.inf  # when there should be one
        self._gone: list[ChildCore] = []  # dead ones, until their processes have been waited for
        # Guards what follows: one thread adds while another gets outputs.
        self._lock = threading.RLock()
        cache = config.cache
        self._router = Router(
            num_replicas, cache.block_size, caches_prefixes=cache.enable_prefix_caching and num_replicas > 1
        )
        self._supervision = config.supervision
        self._supervisor = Supervisor()
        self._restarts = False  # once all have loaded, until `close`
        self._death: OctavoError | None = None  # of the engine, for ever
        if num_replicas > 1:
            config = replace(config, threads=max(1, (config.threads or usable_cores()) // num_replicas))
        self._config = config
        try:
            for number in range(num_replicas):
                self._replicas.append(Replica(number, self._start_core()))
            if self._supervision.hot_standby:
                self._standby = self._start_core()
            elif self._supervision.spare_process and config.parallel.backend == "uniproc":
                self._standby_due_s = time.monotonic() + _SPARE_PAUSE_S
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise EngineDeadError(f"the engine process could not be started: {error}") from error
            raise

    def _start_core(self, *, comes_later: bool = False) -> ChildCore:
        core = ChildCore(self.command, self._sockets, self._deliver, comes_later=comes_later)
        self._poller.register(core.from_core, zmq.POLLIN)
        if not comes_later:
            core.begin(self._config)
        return core

    @property
    def pids(self) -> list[int]:
        """The process id of each replica's core."""
        return [replica.core.child.pid for replica in self._replicas]

    @property
    def outages(self) -> dict[int, str]:
        lost = [replica for replica in self._replicas if not replica.is_ready]
        return {each.number: str(each.core.death or "the model is being loaded") for each in lost}

    def load(self) -> CoreReady:
        """See `EngineCoreClient.load`: all replicas. Raises what the first one raised that failed."""
        hot = [self._standby] if self._standby is not None and self._supervision.hot_standby else []
        cores = [replica.core for replica in self._replicas] + hot
        while any(core.ready is None for core in cores):
            for core in cores:
                if core.death is not None:
                    raise anew(core.death)
            self._receive(_POLL_S)
        self._restarts = self._supervision.max_restarts > 0
        ready = [replica.core.ready for replica in self._replicas if replica.core.ready is not None]
        return CoreReady(profile=ready[0].profile, kv_tokens=sum(each.kv_tokens for each in ready))

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """See `EngineCoreClient.add`. While no core is ready, requests wait here."""
        with self._lock:
            if self._death is not None:
                raise anew(self._death)
            self._supervisor.add(requests)
            self._place()

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            by_replica, ended = self._supervisor.abort(request_ids)
            if ended:
                end = FinishedRequest(finish_reason="abort")
                self._arrived.append(EngineCoreOutputs(finished=dict.fromkeys(ended, end)))
                self._place()  # a trial may have ended with them
        for number, ids in by_replica.items():
            # A dead one's requests end when its death is noticed.
            self._replicas[number].core.try_send(CallMethod(call_id=None, method="abort", arguments=[ids]))

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        self._receiver = threading.get_ident()
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._arrived:
            if self._death is not None:
                raise anew(self._death)
            left_s = end_s - time.monotonic()
            self._receive(min(max(left_s, 0.0), _POLL_S))
            if left_s <= 0.0 and not self._arrived:
                return None
        return self._arrived.popleft()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """See `EngineCoreClient.call`: all cores that are ready, concurrently; again, where one dies meanwhile."""
        while True:
            self._wait_until(lambda: any(replica.is_ready for replica in self._replicas))
            cores = [replica.core for replica in self._replicas if replica.is_ready]
            calls = [core.start_call(method, arguments) for core in cores]
            self._wait_until(lambda: all(call.done() for call in calls))  # noqa: B023 - it waits here
            if calls and not any(isinstance(call.exception(), EngineDeadError) for call in calls):
                return [call.result() for call in calls]

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Receive until something is so, or let the thread that gets outputs do it. Raises if the engine is dead."""
        while not is_so():
            if self._death is not None:
                raise anew(self._death)
            if self._receiver in (None, threading.get_ident()):
                self._receive(_POLL_S)
            else:
                time.sleep(_POLL_S / 10)

    def close(self) -> None:
        self._restarts = False
        cores = [replica.core for replica in self._replicas] + self._gone
        if self._standby is not None:
            cores.append(self._standby)
        # All at the same time, but without threads: none can be started any more when the interpreter ends.
        for core in cores:
            core.begin_close()
        for core in cores:
            core.finish_close()
        with self._receiving:
            self._sockets.destroy(linger=0)

    def _place(self) -> None:
        """Send requests that no core has to where they may run now. Under the lock."""
        ready = [replica.number for replica in self._replicas if replica.is_ready]
        for entries, among in self._supervisor.take_placeable(ready):
            number = self._router.route([entry.request for entry in entries], among)
            for entry in entries:
                entry.replica = number
            core, messages = self._replicas[number].core, AddRequests(requests=[entry.message for entry in entries])
            if self._router.num_unfinished(number) == len(entries):
                core.check_progress(time.monotonic(), 0.0)  # it was silent with reason
            if not core.try_send(messages):  # it has died; they go on when that is noticed
                self._router.withdraw(number, [entry.request.request_id for entry in entries])
                self._supervisor.put_back(entries)
                return

    def _receive(self, timeout_s: float) -> None:
        """Receive what has come, waiting for the first message at most `timeout_s`; look from time to time who died."""
        with self._receiving:
            if self._sockets.closed:
                return
            came = dict(self._poller.poll(int(timeout_s * 1e3)))
            for core in self._cores():
                if core.from_core in came:
                    core.receive()
            if not came or time.monotonic() >= self._next_look_s:
                self._look(time.monotonic())

    def _cores(self) -> list[ChildCore]:
        """Return those that have not been found dead."""
        cores = [replica.core for replica in self._replicas if replica.start_s is None]
        return cores if self._standby is None else [*cores, self._standby]

    def _look(self, now_s: float) -> None:
        """See which cores have died or are stuck; start those that are due."""
        self._next_look_s = now_s + _POLL_S
        for core in self._cores():
            core.notice_exit()
        with self._lock:
            for replica in self._replicas:
                if replica.start_s is None:
                    is_busy = replica.is_ready and self._router.num_unfinished(replica.number)
                    replica.core.check_progress(now_s, self._supervision.stall_timeout_s if is_busy else 0.0)
                elif now_s >= replica.start_s and replica.core.has_exited:  # its memory is free
                    self._replace_core(replica)
            if self._standby is None and self._restarts and now_s >= self._standby_due_s:
                self._standby_due_s = now_s + _LONGEST_PAUSE_S  # if it cannot be started
                self._standby = self._try_start(comes_later=not self._supervision.hot_standby)
        self._gone = [core for core in self._gone if not core.has_exited]

    def _deliver(self, core: ChildCore, message: EngineCoreOutputs | CoreReady | None) -> None:
        """A core has computed something, has loaded, or, None, has died."""
        with self._lock:
            replica = next((each for each in self._replicas if each.core is core), None)
            if replica is None:
                if message is None and core is self._standby:
                    self._standby, self._standby_due_s = None, time.monotonic() + _LONGEST_PAUSE_S
                    self._bury(core)
            elif isinstance(message, EngineCoreOutputs):
                replica.num_failures = 0
                self._router.record(replica.number, message)
                self._arrived.append(replica.add_totals(message))
                if self._supervisor.record(message):
                    self._place()
            elif message is not None:
                if replica.ended:
                    self._arrived.append(replica.add_totals(EngineCoreOutputs(stats=message.stats)))
                self._place()
            else:
                self._lose_core(replica)

    def _lose_core(self, replica: Replica) -> None:
        """A replica's core has died: another one takes its place, and its requests go on."""
        core, supervision = replica.core, self._supervision
        begun = core.begun.read()
        ended = self._supervisor.lose(replica.number, begun, str(core.death))
        self._router.empty(replica.number)
        stats = replica.end_core()
        self._arrived.append(EngineCoreOutputs(finished=ended, stats=stats, replica=replica.number, num_deaths=1))
        replica.num_failures += 1
        if not self._restarts or replica.num_failures > supervision.max_restarts:
            replica.start_s = math.inf
            alive = [each.number for each in self._replicas if each.start_s != math.inf]
            if alive:
                self._supervisor.give_up(replica.number, alive[0])
            else:
                self._death = self._last_death()
        else:
            pause_s = 0.0 if begun else min(_FIRST_PAUSE_S * 2 ** (replica.num_failures - 1), _LONGEST_PAUSE_S)
            replica.start_s = time.monotonic() + pause_s
            others = any(each.is_ready for each in self._replicas)
            logger.error(
                "replica %d: %s; its requests go on in %s",
                replica.number,
                core.death,
                "others" if others else "the next",
            )
        if self._restarts:
            self._bury(core)
            if self._standby is not None and self._standby.ready is not None and replica.start_s != math.inf:
                self._replace_core(replica)
        self._place()

    def _replace_core(self, replica: Replica) -> None:
        """Give a replica the core that stands by, however far it is, or a new one."""
        if self._standby is not None:
            replica.core, self._standby = self._standby, None
            replica.core.begin(self._config)
            self._standby_due_s = time.monotonic() + _STANDBY_PAUSE_S
        else:
            if (core := self._try_start()) is None:
                replica.start_s = time.monotonic() + _LONGEST_PAUSE_S
                return
            replica.core = core
        replica.start_s = None
        self._place()

    def _try_start(self, *, comes_later: bool = False) -> ChildCore | None:
        """Start a core; None if there is no memory or no process for it now: it may be better later."""
        try:
            return self._start_core(comes_later=comes_later)
        except OSError as error:
            logger.error("the engine process could not be started: %s", error)
            return None

    def _bury(self, core: ChildCore) -> None:
        """Let go of a dead core's sockets; while messages are received."""
        self._poller.unregister(core.from_core)
        core.bury()
        self._gone.append(core)

    def _last_death(self) -> OctavoError:
        deaths = [replica.core.death for replica in self._replicas]
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
        load = self._loads[replica]
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

    def num_unfinished(self, replica: int) -> int:
        """The number of requests that a replica has."""
        return len(self._loads[replica].unfinished)

    def empty(self, replica: int) -> None:
        """A replica's core has died, and with it all that it had."""
        self._loads[replica] = ReplicaLoad()
