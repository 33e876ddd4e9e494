"""The engine thread of an `AsyncLLMEngine`: waits for outputs and passes them to the event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable

from octavo.contracts.engine import EngineCoreOutputs
from octavo.engine.core_client import EngineCoreClient
from octavo.errors import EngineDeadError, OctavoError

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.1  # how often it checks whether to stop


class OutputPump:
    """Runs from construction until `stop`, or until the core is dead."""

    def __init__(
        self,
        client: EngineCoreClient,
        loop: asyncio.AbstractEventLoop,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[OctavoError], None],
    ) -> None:
        self._client = client
        self._loop = loop
        self._on_outputs, self._on_death = on_outputs, on_death
        self._should_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def stop(self, reason: OctavoError) -> None:
        """Stop the thread after the step in flight; `on_death` gets the reason."""
        self._should_stop.set()
        self._thread.join()
        self._post(self._on_death, reason)

    def _run(self) -> None:
        try:
            while not self._should_stop.is_set():
                outputs = self._client.get_outputs(_IDLE_WAIT_S)
                if outputs is not None:
                    self._post(self._on_outputs, outputs)
        except EngineDeadError as death:
            self._post(self._on_death, death)
        except Exception as error:
            logger.exception("the engine thread cannot continue")
            self._post(self._on_death, EngineDeadError(f"{type(error).__name__}: {error}"))

    def _post(self, callback: Callable[..., None], argument: object) -> None:
        """Run a callback in the loop, unless it has closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, argument)
