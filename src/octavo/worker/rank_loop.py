"""The life of a rank behind an executor, whatever carries the messages: a call or a step in, a reply out."""

import traceback
from collections.abc import Callable

import msgspec

from octavo.contracts.ranks import (
    FromRank,
    RankCall,
    RankFailure,
    RankResult,
    decode_to_rank,
    encode_from_rank,
)
from octavo.contracts.schedule import SchedulerOutput
from octavo.worker.wrapper import WorkerWrapperBase


class RankLoop:
    """Every rank replies to a call. A step is answered by one rank (`RankPlace.returns_output`), its failure by any."""

    def __init__(
        self,
        worker: WorkerWrapperBase,
        receive: Callable[[], bytes],
        send: Callable[[bytearray], None],
    ) -> None:
        self._worker = worker
        self._receive, self._send = receive, send

    def run(self) -> None:
        """Serve until there is nobody to receive from: then `receive` raises EOFError, or this process has ended."""
        while True:
            message = decode_to_rank(self._receive())
            if isinstance(message, SchedulerOutput):
                self._step(message)
            else:
                self._reply(self._call(message))

    def _step(self, scheduler_output: SchedulerOutput) -> None:
        try:
            model_output = self._worker.execute_model(scheduler_output)
        except Exception as error:  # noqa: BLE001 - whatever a forward raises belongs to the requests of this step
            self._reply(_failure(error, scheduler_output.step))
        else:
            if self._worker.place.returns_output:
                self._reply(msgspec.structs.replace(model_output, req_ids=()))  # whoever gave the order knows them

    def _call(self, call: RankCall) -> RankResult | RankFailure:
        try:
            return RankResult(value=getattr(self._worker, call.method)(*call.arguments))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, who is told
            return _failure(error, None)

    def _reply(self, message: FromRank) -> None:
        self._send(encode_from_rank(message))


def _failure(error: Exception, step: int | None) -> RankFailure:
    return RankFailure(
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        step=step,
    )
