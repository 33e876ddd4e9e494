"""Several ranks on this host, each in its own process; steps go through shared memory, replies through pipes."""

import contextlib
import os
import signal
import subprocess
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe

import msgspec

from octavo.config.engine import EngineConfig
from octavo.config.parallel import Rendezvous
from octavo.contracts.frames import plain
from octavo.device.cgroups import usable_cores
from octavo.distributed.shm_broadcast import RingWriter
from octavo.errors import DeviceUnavailableError
from octavo.executor.distributed import DistributedExecutor
from octavo.executor.ranks import Wait
from octavo.worker.worker_proc import DEFAULT_WORKER, LocalSetup, RankSetup
from octavo.working_folder import child_command, child_environment

_DEATH_S = 5.0  # between a rank's hang-up and its exit


class MultiprocExecutor(DistributedExecutor):
    """Implements `Executor`. `worker_class` ("module:class") replaces the worker in tests."""

    def __init__(self, config: EngineConfig, worker_class: str = DEFAULT_WORKER) -> None:
        super().__init__(config, lambda: LocalRanks(config, worker_class))


class LocalRanks:
    """Implements `Ranks` with child processes, which run `octavo.worker.worker_proc`."""

    def __init__(self, config: EngineConfig, worker_class: str) -> None:
        if not hasattr(os, "eventfd"):
            raise DeviceUnavailableError("several ranks on one host require Linux (eventfd and memfd_create)")
        num_ranks = config.parallel.world_size
        self._ring = RingWriter(num_ranks)
        self.replies: list[Connection[bytes, bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        meeting_fds = [os.memfd_create("octavo-store"), os.memfd_create("octavo-collectives")]
        environment = child_environment()
        command = child_command("octavo.worker.worker_proc", also_imports=worker_class.partition(":")[0])
        if "OMP_NUM_THREADS" not in os.environ:  # the user has not decided
            environment |= {"OMP_NUM_THREADS": str(max(1, usable_cores() // num_ranks))}
        config = replace(config, threads=config.threads and max(1, config.threads // num_ranks))
        for rank in range(num_ranks):
            reader, writer = Pipe(duplex=False)
            self.replies.append(reader)
            with writer:
                meeting = Rendezvous(store_fd=meeting_fds[0], memory_fd=meeting_fds[1], local_rank=rank)
                setup = LocalSetup(
                    rank=RankSetup(config=config, rank=rank, rendezvous=meeting, worker_class=worker_class),
                    orders=self._ring.ends[rank],
                    replies_fd=writer.fileno(),
                )
                fds = [*meeting_fds, *setup.orders, setup.replies_fd]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, env=environment)
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # already dead; the death watch reports it
                process.stdin.write(msgspec.json.encode(setup, enc_hook=plain) + b"\n")
                process.stdin.flush()
        for fd in meeting_fds:
            os.close(fd)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def broadcast(self, message: bytes | bytearray, wait: Wait) -> None:
        self._ring.write(message, wait)

    def describe(self, rank: int) -> str:
        return f"process {self._processes[rank].pid}"

    def how_it_ended(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"killed by signal {-code}"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def join(self, timeout_s: float) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self.replies:
            connection.close()
        self._ring.close()
