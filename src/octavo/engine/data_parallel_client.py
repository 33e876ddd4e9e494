"""Several engine cores under one client: replicas of the model, each a process with its own scheduler and KV cache.

The requests of a replica that dies end with `EngineDeadError`; the others continue. The engine is dead when the last
replica is.
"""

import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, SchedulerStats
from octavo.device.cores import usable_cores
from octavo.engine.core_client import CoreMethod
from octavo.engine.process_client import ProcessClient
from octavo.engine.routing import Router
from octavo.errors import EngineDeadError, OctavoError

logger = logging.getLogger(__name__)


class DataParallelClient:
    """Implements `EngineCoreClient`. All replicas load at the same time, each with its share of the host's cores."""

    def __init__(self, config: EngineConfig) -> None:
        self._arrivals: queue.SimpleQueue[tuple[int, EngineCoreOutputs | None]] = (
            queue.SimpleQueue()
        )  # None: the replica died
        num_replicas = config.parallel.data_parallel_size
        self._replicas: list[ProcessClient] = []
        with ExitStack() as started:  # if one cannot start, close the others
            for number in range(num_replicas):
                self._replicas.append(self._start(_config_of_replica(config), number))
                started.callback(self._replicas[-1].close)
            started.pop_all()
        self._lock = threading.Lock()  # guards the following: one thread adds while another gets outputs
        self._router = Router(num_replicas, config.cache.block_size, caches_prefixes=config.cache.enable_prefix_caching)
        self._homes: dict[str, int] = {}  # unfinished request id -> its replica
        self._stats: dict[int, SchedulerStats] = {}  # the latest of each replica

    def _start(self, config: EngineConfig, number: int) -> ProcessClient:
        return ProcessClient(config, lambda outputs: self._arrivals.put((number, outputs)))

    @property
    def profile(self) -> str:
        return self._replicas[0].profile

    @property
    def kv_tokens(self) -> int:
        return sum(replica.kv_tokens for replica in self._replicas)

    def load(self) -> None:
        """See `EngineCoreClient.load`: all replicas.

        Raises:
            UserError: from the first replica that failed to load.
        """
        for replica in self._replicas:
            replica.load()

    @property
    def pids(self) -> list[int]:
        """The replicas' process ids."""
        return [replica.pid for replica in self._replicas]

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """See `EngineCoreClient.add`. Samples of one request stay together.

        Raises:
            EngineDeadError: no replica is left.
        """
        ids = [request.request_id for request in requests]
        while True:
            with self._lock:
                if not self._router.replicas:
                    raise self._last_death()
                number = self._router.route(requests)
                self._homes.update(dict.fromkeys(ids, number))
            try:
                return self._replicas[number].add(requests)
            except EngineDeadError:  # died just now: `get_outputs` ends its requests; these did not reach it
                with self._lock:
                    self._router.drop(number)
                    for request_id in ids:
                        self._homes.pop(request_id, None)

    def abort(self, request_ids: list[str]) -> None:
        by_replica: dict[int, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                if (home := self._homes.get(request_id)) is not None:
                    by_replica.setdefault(home, []).append(request_id)
        for number, ids in by_replica.items():
            if self._replicas[number].death is None:
                self._replicas[number].abort(ids)

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        try:
            number, outputs = self._arrivals.get(block=timeout_s != 0.0, timeout=timeout_s)
        except queue.Empty:
            return None
        if outputs is None:
            return self._end_replica(number)
        with self._lock:
            self._note(number, outputs)
        return msgspec.structs.replace(outputs, replica=number)

    def call(self, method: CoreMethod) -> None:
        """See `EngineCoreClient.call`: all live replicas, concurrently."""
        with self._lock:
            replicas = [self._replicas[number] for number in self._router.replicas]
        with ThreadPoolExecutor(len(self._replicas)) as threads:
            for _ in threads.map(lambda replica: replica.call(method), replicas):
                pass

    def close(self) -> None:
        # All at the same time, but without threads: none can be started any more when the interpreter ends.
        for replica in self._replicas:
            replica.begin_close()
        for replica in self._replicas:
            replica.finish_close()

    def _note(self, number: int, outputs: EngineCoreOutputs) -> None:
        for request_id in outputs.finished:
            self._homes.pop(request_id, None)
        if number in self._router.replicas:
            self._router.record_admitted(number, outputs.admitted)
            self._router.record_finished(number, outputs.finished)
        if outputs.stats is not None:
            if number not in self._stats:
                self._router.record_blocks(number, outputs.stats.num_blocks)
            self._stats[number] = outputs.stats

    def _end_replica(self, number: int) -> EngineCoreOutputs:
        """Return outputs that end a dead replica's unfinished requests.

        Raises:
            EngineDeadError: it was the last one.
        """
        death = self._replicas[number].death
        assert death is not None
        with self._lock:
            self._router.drop(number)
            lost = [request_id for request_id, home in self._homes.items() if home == number]
            for request_id in lost:
                del self._homes[request_id]
            num_left = len(self._router.replicas)
        if not num_left:
            self._arrivals.put((number, None))  # for the next call
            raise self._last_death()
        logger.error(
            "replica %d died: %s; %d of its requests end, %d replicas remain", number, death, len(lost), num_left
        )
        end = FinishedRequest(
            finish_reason="error", error=f"replica {number}: {death}", error_type=EngineDeadError.__name__
        )
        return EngineCoreOutputs(
            epoch=0,
            req_ids=[],
            num_new_tokens=[],
            first_indices=[],
            new_token_ids=[],
            num_scheduled_tokens=0,
            finished=dict.fromkeys(lost, end),
            stats=self._stats.get(number, SchedulerStats()).ended(),
            replica=number,
        )

    def _last_death(self) -> OctavoError:
        deaths = [f"replica {number}: {replica.death}" for number, replica in enumerate(self._replicas)]
        return EngineDeadError("all replicas are gone: " + "; ".join(deaths))


def _config_of_replica(config: EngineConfig) -> EngineConfig:
    """Return the configuration of one replica: replicas share the host's cores."""
    threads = config.threads or usable_cores()
    return replace(config, threads=max(1, threads // config.parallel.data_parallel_size))
