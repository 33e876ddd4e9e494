"""The engine thread of an `AsyncLLMEngine`: takes outputs from the core and keeps them for the event loop."""

import asyncio
import atexit
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from octavo.contracts.engine import EngineCoreOutputs
from octavo.engine.core_client import EngineCoreClient
from octavo.errors import EngineDeadError, OctavoError

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.1  # how often it checks whether to stop


class OutputPump:
    """Runs from construction until `close` or `abandon`, and then shuts the core down.

    It does not know its engine, so that one which nobody uses any more is collected; nor does an output depend on the
    loop that happens to be attached when it arrives: the next loop takes what a closed one has left.
    """

    def __init__(self, client: EngineCoreClient, shut_down: Callable[[], None]) -> None:
        self._client, self._shut_down = client, shut_down
        self._arrived: deque[EngineCoreOutputs | OctavoError] = deque()
        self._reader: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None
        self._should_stop = threading.Event()
        self._closed: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before the interpreter takes the thread's world down

    def attach(self, loop: asyncio.AbstractEventLoop, notify: Callable[[], None]) -> None:
        """Have `notify` called in this loop, instead of the one before, whenever there is something to take."""
        self._reader = loop, notify
        self._wake()

    def take(self) -> Iterator[EngineCoreOutputs | OctavoError]:
        """Yield what has arrived, oldest first; an error is why nothing else will come."""
        while self._arrived:
            yield self._arrived.popleft()

    def check(self) -> None:
        """Raise RuntimeError if no outputs will come because this process was forked from the engine's."""
        if not self._has_thread:
            raise RuntimeError("this engine was made in a process that has been forked")

    @property
    def _has_thread(self) -> bool:
        """Whether the thread runs here or has come to its end, unlike in a forked process."""
        return self._thread.is_alive() or self._closed.done()

    def close(self, reason: OctavoError | None = None) -> None:
        """Stop after the step in flight and shut the core down; `reason` is what its readers get. Idempotent.

        Raises:
            Exception: what shutting down the core raised.
        """
        self._should_stop.set()
        if not self._has_thread:
            return  # everything belongs to the process that was forked
        self._closed.result()
        if reason is not None:
            self._put(reason)

    def abandon(self) -> None:
        """`close` without waiting: for a finalizer, which may run in any thread and at any moment."""
        self._should_stop.set()

    def _run(self) -> None:
        try:
            while not self._should_stop.is_set():
                outputs = self._client.get_outputs(_IDLE_WAIT_S)
                if outputs is not None:
                    self._put(outputs)
        except EngineDeadError as death:
            self._put(death)
        except Exception as error:
            logger.exception("the engine thread cannot continue")
            self._put(EngineDeadError(f"{type(error).__name__}: {error}"))
        self._should_stop.wait()
        try:
            self._shut_down()
        except BaseException as error:  # noqa: BLE001 - raised by `close`
            self._closed.set_exception(error)
        else:
            self._closed.set_result(None)
        atexit.unregister(self.close)

    def _put(self, item: EngineCoreOutputs | OctavoError) -> None:
        self._arrived.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            loop, notify = self._reader
            with contextlib.suppress(RuntimeError):  # it has closed; the next loop takes the outputs
                loop.call_soon_threadsafe(notify)
