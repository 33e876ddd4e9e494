"""A rank of an executor: builds its worker in its own process, then serves calls and steps.

Independent of the transport: `worker_proc` on this host, `remote_rank` on another.
"""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Protocol

import msgspec

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.engine import AdapterRef
from octavo.contracts.ranks import (
    AdapterLoaded,
    EvictAdapter,
    FromRank,
    LoadAdapter,
    RankCall,
    RankFailure,
    RankResult,
    decode_to_rank,
    encode_from_rank,
)
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.distributed.rendezvous import Rendezvous

DEFAULT_WORKER = "octavo.worker.worker:Worker"


class RankWorker(Protocol):
    """The methods that an executor calls on a rank. The constructor takes `(config, place, rendezvous)`."""

    @property
    def profile(self) -> str: ...

    def load_model(self) -> None: ...

    def count_kv_blocks(self) -> list[int]: ...

    def initialize_kv_cache(self, num_blocks: list[int]) -> None: ...

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]: ...

    def warmup(self) -> None: ...

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool: ...

    def load_adapter(self, adapter: AdapterRef) -> Future[None]: ...

    def evict_adapter(self, content_hash: str) -> None: ...


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments for building a rank's worker."""

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous
    worker_class: str = DEFAULT_WORKER  # "module:class"


class WorkerWrapperBase:
    """Cheap to create: `init_worker` imports what the worker needs, so a process can report early that it is alive."""

    def __init__(self, setup: RankSetup) -> None:
        self.place = RankPlace.of(setup.rank, setup.config.parallel)
        self._setup = setup
        self._worker: RankWorker | None = None

    @property
    def worker(self) -> RankWorker:
        assert self._worker is not None, "call init_worker first"
        return self._worker

    def init_worker(self) -> str:
        """Import and build the worker, which connects to the other ranks; return its profile."""
        module, _, name = self._setup.worker_class.partition(":")
        self._worker = getattr(import_module(module), name)(self._setup.config, self.place, self._setup.rendezvous)
        return self.worker.profile


class RankLoop:
    """All ranks reply to a call. One rank (`RankPlace.returns_output`) replies to a step, any rank to its failure.

    The thread that has loaded an adapter replies itself.
    """

    def __init__(
        self,
        wrapper: WorkerWrapperBase,
        receive: Callable[[], bytes],
        send: Callable[[bytearray], None],
    ) -> None:
        self._wrapper = wrapper
        self._receive, self._send = receive, send
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Serve until the executor disconnects: then `receive` raises EOFError, or this process has exited."""
        while True:
            message = decode_to_rank(self._receive())
            match message:
                case SchedulerOutput():
                    self._step(message)
                case RankCall():
                    self._reply(self._call(message))
                case LoadAdapter():
                    self._load_adapter(message.adapter)
                case EvictAdapter():
                    self._wrapper.worker.evict_adapter(message.content_hash)

    def _step(self, scheduler_output: SchedulerOutput) -> None:
        try:
            model_output = self._wrapper.worker.begin(scheduler_output).result()
        except Exception as error:  # noqa: BLE001 - any error fails the requests of this step
            self._reply(_failure(error, scheduler_output.step))
        else:
            if self._wrapper.place.returns_output:
                self._reply(msgspec.structs.replace(model_output, req_ids=()))  # the scheduler knows them

    def _call(self, call: RankCall) -> RankResult | RankFailure:
        try:
            target = self._wrapper if call.method == "init_worker" else self._wrapper.worker
            return RankResult(value=getattr(target, call.method)(*call.arguments))
        except Exception as error:  # noqa: BLE001 - reported to the caller
            return _failure(error, None)

    def _load_adapter(self, adapter: AdapterRef) -> None:
        def reply(loading: Future[None]) -> None:
            error = loading.exception()
            failure = _failure(error, None) if error is not None else None
            self._reply(AdapterLoaded(content_hash=adapter.content_hash, failure=failure))

        self._wrapper.worker.load_adapter(adapter).add_done_callback(reply)

    def _reply(self, message: FromRank) -> None:
        encoded = encode_from_rank(message)
        with self._send_lock:
            self._send(encoded)


def _failure(error: BaseException, step: int | None) -> RankFailure:
    return RankFailure(
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        step=step,
    )
