"""Ranks on one or more machines, placed and started by Ray. Steps go through our own TCP connections.

A Ray actor call takes a millisecond, a message through a socket tens of microseconds. By default, ranks are distributed
evenly over the machines of the cluster, consecutive ranks together.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from octavo.config.engine import EngineConfig
from octavo.config.parallel import Rendezvous
from octavo.contracts.frames import plain
from octavo.errors import EngineDeadError, InvalidParameterError
from octavo.executor.distributed import DistributedExecutor
from octavo.executor.ranks import Wait
from octavo.worker.worker_proc import DEFAULT_WORKER, TOKEN_BYTES, RankSetup, RemoteRank, accept_rank, as_connection

logger = logging.getLogger(__name__)

_PLACING_S = 60.0  # others may hold the resources
_CONNECT_S = 60.0
_HANDSHAKE_S = 5.0
_VERDICT_S = 1.0  # for Ray to notice that an actor is dead


class RayExecutor(DistributedExecutor):
    """Implements `Executor`. Raises InvalidParameterError: Ray is not installed, or its cluster has too little."""

    def __init__(self, config: EngineConfig, worker_class: str = DEFAULT_WORKER) -> None:
        ray = import_ray()
        super().__init__(config, lambda: RayRanks(ray, config, worker_class))


def import_ray() -> ModuleType:
    """Import Ray, an optional dependency."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    try:
        import ray
    except ImportError as error:
        limit = "requires Ray, which is not installed: pip install 'octavo[ray]'"
        raise InvalidParameterError("distributed_executor_backend", "ray", limit) from error
    module: ModuleType = ray
    return module


class Placed(NamedTuple):
    """An actor and its location."""

    actor: Any
    host: str
    process_id: int


class RayRanks:
    """Implements `Ranks` with actors of a placement group. Joins the running cluster or starts one."""

    def __init__(self, ray: ModuleType, config: EngineConfig, worker_class: str) -> None:
        self._ray = ray
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            ray.init(configure_logging=False, include_dashboard=False)
        self.replies: Sequence[Connection[bytes, bytes]] = []
        self._placed: list[Placed] = []
        self._group: Any = None
        try:
            self._start(config, worker_class)
        except BaseException:
            self.kill()
            self.join(0.0)
            raise

    @property
    def hosts(self) -> list[str]:
        """The address of each rank's machine."""
        return [placed.host for placed in self._placed]

    @property
    def pids(self) -> list[int]:
        """The process id of each rank on its machine."""
        return [placed.process_id for placed in self._placed]

    def broadcast(self, message: bytes | bytearray, wait: Wait) -> None:
        for connection in self.replies:
            connection.send_bytes(message)

    def describe(self, rank: int) -> str:
        return f"process {self._placed[rank].process_id} on {self._placed[rank].host}"

    def how_it_ended(self, rank: int) -> str:
        try:
            self._ray.get(self._runs[rank], timeout=_VERDICT_S)
        except self._ray.exceptions.GetTimeoutError:
            return "its connection is lost"
        except self._ray.exceptions.RayError as error:
            first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            return f"{type(error).__name__}: {first_line}"
        return "it exited"

    def kill(self) -> None:
        for placed in self._placed:
            with contextlib.suppress(ValueError, self._ray.exceptions.RayError):  # already gone
                self._ray.kill(placed.actor)

    def join(self, timeout_s: float) -> None:
        self.kill()
        for connection in self.replies:
            connection.close()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._owns_cluster:
            self._ray.shutdown()

    def _start(self, config: EngineConfig, worker_class: str) -> None:
        self._placed = self._place(config)
        own_host = self._ray.util.get_node_ip_address()
        with socket.create_server((own_host, 0)) as listener:
            token = secrets.token_bytes(TOKEN_BYTES)
            address = listener.getsockname()
            setups = self._setups(config, worker_class)
            self._runs = [
                placed.actor.run.remote(msgspec.json.encode(setup, enc_hook=plain), address, token)
                for placed, setup in zip(self._placed, setups, strict=True)
            ]
            self.replies = self._accept(listener, token)

    def _place(self, config: EngineConfig) -> list[Placed]:
        """Reserve resources and start an actor for each rank; sort them so that neighbors share a machine."""
        num_ranks = config.parallel.world_size
        resources = self._resources_of_rank(config)
        util = self._ray.util
        self._group = util.placement_group([resources] * num_ranks, strategy="PACK")
        if not self._group.wait(_PLACING_S):
            limit = f"the Ray cluster has no room for {num_ranks} ranks of {resources}: {self._ray.cluster_resources()}"
            raise InvalidParameterError("distributed_executor_backend", "ray", limit)
        remote = self._ray.remote(RemoteRank)
        actors = [
            remote.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(num_ranks)
        ]
        process_ids = self._ray.get([actor.process_id.remote() for actor in actors])
        nodes = util.placement_group_table(self._group)["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        placed = [Placed(actor, hosts[nodes[index]], process_ids[index]) for index, actor in enumerate(actors)]
        own_host = util.get_node_ip_address()
        return sorted(placed, key=lambda rank: (rank.host != own_host, rank.host))

    def _resources_of_rank(self, config: EngineConfig) -> dict[str, float]:
        """Return the resources to reserve per rank: a GPU if there are enough, else its share of a machine's cores."""
        num_ranks = config.parallel.world_size
        if config.device in ("auto", "cuda") and self._ray.cluster_resources().get("GPU", 0) >= num_ranks:
            return {"CPU": 1, "GPU": 1}
        if config.threads is not None:
            return {"CPU": max(1, config.threads // num_ranks)}
        cores = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        cores = [count for count in cores if count >= 1] or [1]
        ranks_of_machine = -(-num_ranks // len(cores))
        return {"CPU": max(1, int(min(cores)) // ranks_of_machine)}

    def _setups(self, config: EngineConfig, worker_class: str) -> list[RankSetup]:
        """Return the setup of each rank. Rank 0 hosts the store for the rendezvous."""
        num_ranks, hosts = len(self._placed), self.hosts
        port = self._ray.get(self._placed[0].actor.open_store.remote(hosts[0]))
        config = replace(config, threads=config.threads and max(1, config.threads // num_ranks))
        return [
            RankSetup(
                config=config,
                rank=rank,
                # Ray shows a rank only its own GPU, so each is number 0 of its host.
                rendezvous=Rendezvous(store_address=f"{hosts[0]}:{port}", host=host, local_rank=0),
                worker_class=worker_class,
            )
            for rank, host in enumerate(hosts)
        ]

    def _accept(self, listener: socket.socket, token: bytes) -> "list[Connection[bytes, bytes]]":
        """Wait until every rank has connected; reject all other connections."""
        connections: dict[int, Connection[bytes, bytes]] = {}
        deadline_s = time.monotonic() + _CONNECT_S
        while len(connections) < len(self._placed):
            ended, _ = self._ray.wait(self._runs, timeout=0)
            if ended or time.monotonic() > deadline_s:
                rank = self._runs.index(ended[0]) if ended else min(set(range(len(self._runs))) - connections.keys())
                raise EngineDeadError(f"rank {rank} ({self.describe(rank)}) did not connect: {self.how_it_ended(rank)}")
            if select.select([listener], [], [], 0.2)[0]:
                line, _ = listener.accept()
                line.settimeout(_HANDSHAKE_S)
                with contextlib.suppress(OSError):
                    rank_or_none = accept_rank(line, token)
                    if rank_or_none is not None:
                        connections[rank_or_none] = as_connection(line)
                line.close()
        return [connections[rank] for rank in range(len(connections))]
