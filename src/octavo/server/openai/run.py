"""The requests behind one HTTP request, running: one for each prompt, with one event for all of them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.live_request import LiveRequest
from octavo.engine.request_state import CompletionDelta, RequestState
from octavo.errors import RequestError, named_error
from octavo.server.errors import ApiError, as_api_error
from octavo.server.openai.replies import Usage, make_usage

PING_S = 10.0  # silence that proxies and clients are spared


class Run:
    """Starts all or nothing. Close it in any case (`with`): what has not ended is aborted."""

    def __init__(self, engine: AsyncLLMEngine, prompts: Sequence[ProcessedRequest]) -> None:
        self._news = asyncio.Event()
        self._is_quiet = False  # nothing came since the timer last looked
        self._timer: asyncio.TimerHandle | None = None
        self._lives: list[LiveRequest] = []
        self._num_samples = prompts[0].params.n
        self.num_reasoning_tokens = 0  # counted by those who read the answers
        try:
            for prompt in prompts:
                self._lives.append(engine.open(prompt, self._news))
        except BaseException:
            self.close()
            raise

    @property
    def states(self) -> list[RequestState]:
        return [live.state for live in self._lives]

    @property
    def num_choices(self) -> int:
        return len(self._lives) * self._num_samples

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        states = self.states
        return make_usage(
            sum(state.num_prompt_tokens for state in states),
            sum(state.num_output_tokens for state in states),
            sum(state.num_cached_tokens for state in states),
            self.num_reasoning_tokens,
        )

    async def deltas(self, *, pings: bool = False) -> AsyncGenerator[list[tuple[int, CompletionDelta]], None]:
        """Yield what is new, with the number of its choice (prompt by prompt); a slow reader gets more at once.

        With `pings`, an empty list comes whenever nothing else came for `PING_S`.

        Raises:
            ApiError, EngineDeadError: a sample failed or was aborted; the engine is gone.
        """
        if pings:
            self._start_timer()
        waiting = dict(enumerate(self._lives))
        while waiting:
            await self._news.wait()
            self._news.clear()
            news: list[tuple[int, CompletionDelta]] = []
            for number, live in list(waiting.items()):
                for delta in live.take():
                    _check_end(delta)
                    news.append((number * self._num_samples + delta.index, delta))
                if live.is_taken:
                    del waiting[number]
            if news or self._is_quiet:
                self._is_quiet = False
                yield news

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._look)

    def _look(self) -> None:
        if self._is_quiet:
            self._news.set()
        self._is_quiet = True
        self._start_timer()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for live in self._lives:
            live.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_end(delta: CompletionDelta) -> None:
    if delta.finish_reason == "error":
        raise as_api_error(named_error(delta.error_type or RequestError.__name__, delta.error or "The request failed."))
    if delta.finish_reason == "abort":
        raise ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})
