"""The engine core in this process."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import CoreReady, EngineCoreOutputs, EngineCoreRequest
from octavo.engine.core import EngineCore
from octavo.executor.base import make_executor


class InprocClient:
    """Implements `EngineCoreClient`. The thread that gets outputs runs the core: messages first, then a step.

    No signal handler must run in that thread: steps are not made to be interrupted.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loaded: EngineCore | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._core_thread: int | None = None  # the thread that last got outputs

    @property
    def outages(self) -> dict[int, str]:
        return {}

    def load(self) -> CoreReady:
        executor = make_executor(self._config)
        try:
            self._loaded = EngineCore(self._config, executor)
        except BaseException:
            executor.exit()
            raise
        return self._loaded.ready

    def add(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self._inbox.put(partial(self._core.add_request, request))

    def abort(self, request_ids: list[str]) -> None:
        self._inbox.put(partial(self._core.abort, request_ids))

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        self._core_thread = threading.get_ident()
        self._handle_messages(0.0)
        if not self._core.has_work() and timeout_s != 0.0:
            self._handle_messages(timeout_s)
        return self._core.step() if self._core.has_work() else None

    def call(self, method: str, *arguments: Any) -> list[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(getattr(self._core, method)(*arguments))
            except Exception as error:  # noqa: BLE001 - raised in the waiting caller
                done.set_exception(error)

        self._inbox.put(run)
        if self._core_thread in (None, threading.get_ident()):
            self._handle_messages(0.0)  # no other thread will
        return [done.result()]

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()

    @property
    def _core(self) -> EngineCore:
        assert self._loaded is not None, "load comes first"
        return self._loaded

    def _handle_messages(self, timeout_s: float | None) -> None:
        """Handle pending messages; if there are none, wait for one at most `timeout_s`."""
        while True:
            try:
                message = self._inbox.get(block=timeout_s != 0.0, timeout=timeout_s)
            except queue.Empty:
                return
            message()
            timeout_s = 0.0
