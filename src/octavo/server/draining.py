"""uvicorn's server with a graceful shutdown of our own.

The first SIGTERM or SIGINT starts draining: HTTP keeps responding, new work is rejected, requests in flight get
`drain_timeout_s` to finish before they are cancelled. A second signal cancels them at once.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from octavo.server.middleware.admission import Admission

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2  # for connections to flush pending data, once all requests have ended


class DrainingServer(uvicorn.Server):
    """On a signal, `run` returns to its caller instead of letting the signal kill the process."""

    def __init__(self, config: uvicorn.Config, admission: Admission, drain_timeout_s: float) -> None:
        config.timeout_graceful_shutdown = _LAST_WORDS_S
        super().__init__(config)
        self._admission = admission
        self._drain_timeout_s = drain_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.num_cut = 0  # requests that were cancelled

    def stop(self) -> None:
        """Stop at once: the engine is dead, so no request can continue."""
        self.should_exit = True

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().main_loop()

    def shut_down(self) -> None:
        """Drain; when called again, cancel what is still running. Runs in the event loop."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._draining.cancel()
            self._draining = asyncio.create_task(self._end("told to end at once"))

    async def _drain(self) -> None:
        self._admission.start_draining()
        logger.info("shutting down: %d requests may finish within %g s; a second signal ends them",
                    len(self._admission), self._drain_timeout_s)  # fmt: skip
        if await self._is_idle_within(self._drain_timeout_s):
            self.stop()
        else:
            await self._end(f"not finished within {self._drain_timeout_s:g} s")

    async def _end(self, reason: str) -> None:
        num_cut = self._admission.end_all()
        self.num_cut += num_cut
        if num_cut:
            logger.warning("%d requests cancelled: %s", num_cut, reason)
        await self._is_idle_within(_LAST_WORDS_S)
        self.stop()

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._admission.wait_until_idle()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None:  # not serving yet
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.shut_down)
