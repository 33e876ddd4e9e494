"""A rank of an executor: builds its worker in its own process, then serves calls and steps.

Independent of the transport: `worker_proc` on this host, `remote_rank` on another.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.ranks import FromRank, RankCall, RankFailure, RankResult, decode_to_rank, encode_from_rank
from octavo.contracts.schedule import SchedulerOutput
from octavo.distributed.rendezvous import Rendezvous

DEFAULT_WORKER = "octavo.worker.worker:Worker"


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments for building a rank's worker."""

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous
    worker_class: str = DEFAULT_WORKER  # "module:class"


class RankLoop:
    """All ranks reply to a call. One rank (`RankPlace.returns_output`) replies to a step, any rank to its failure.

    A call that goes on beside later steps is replied to by the thread that ends it.
    """

    def __init__(self, setup: RankSetup, receive: Callable[[], bytes], send: Callable[[bytearray], None]) -> None:
        self._setup = setup
        self._place = RankPlace.of(setup.rank, setup.config.parallel)
        self._worker: Any = None  # an instance of `setup.worker_class`, once `init_worker` has been called
        self._receive, self._send = receive, send
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Serve until the executor disconnects: then `receive` raises EOFError, or this process has exited."""
        while True:
            message = decode_to_rank(self._receive())
            if isinstance(message, SchedulerOutput):
                self._step(message)
            else:
                self._call(message)

    def init_worker(self) -> str:
        """Import and build the worker, which connects to the other ranks; return its profile.

        A call like others: a process can report that it is alive before it imports what the worker needs.
        """
        module, _, name = self._setup.worker_class.partition(":")
        self._worker = getattr(import_module(module), name)(self._setup.config, self._place, self._setup.rendezvous)
        profile: str = self._worker.profile
        return profile

    def _step(self, scheduler_output: SchedulerOutput) -> None:
        try:
            model_output = self._worker.begin(scheduler_output).result()
        except Exception as error:  # noqa: BLE001 - any error fails the requests of this step
            self._reply(_failure(error, step=scheduler_output.step))
        else:
            if self._place.returns_output:
                self._reply(msgspec.structs.replace(model_output, req_ids=()))  # the scheduler knows them

    def _call(self, call: RankCall) -> None:
        target = self if self._worker is None else self._worker
        hints = get_type_hints(getattr(target, call.method)).values()  # in the order of the parameters
        call_worker(
            target,
            call.method,
            [msgspec.convert(argument, hint) for argument, hint in zip(call.arguments, hints, strict=False)],
            lambda value: self._reply(RankResult(call_id=call.call_id, value=value)),
            lambda error: self._reply(_failure(error, call_id=call.call_id)),
        )

    def _reply(self, message: FromRank) -> None:
        encoded = encode_from_rank(message)
        with self._send_lock:
            self._send(encoded)


def call_worker(
    worker: object,
    method: str,
    arguments: Sequence[Any],
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Call a method by its name and report how it ended; one that returns a future ends as that does."""

    def end(done: Future[Any]) -> None:
        if (error := done.exception()) is not None:
            fail(error)
        else:
            succeed(done.result())

    try:
        value = getattr(worker, method)(*arguments)
    except Exception as error:  # noqa: BLE001 - reported to the caller
        fail(error)
        return
    if isinstance(value, Future):
        value.add_done_callback(end)
    else:
        succeed(value)


def _failure(error: BaseException, *, step: int | None = None, call_id: int = -1) -> RankFailure:
    return RankFailure(
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        step=step,
        call_id=call_id,
    )
