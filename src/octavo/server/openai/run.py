"""The requests behind one HTTP request, running: one for each prompt, with one event for all of them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.live_request import LiveRequest
from octavo.engine.request_state import CompletionDelta, RequestState
from octavo.errors import RequestError, named_error
from octavo.server.errors import ApiError, as_api_error
from octavo.server.openai.replies import Usage, make_usage


class Run:
    """Starts all or nothing. Close it in any case (`with`): what has not ended is aborted.

    `notify` is called in the event loop whenever there may be something to take.
    """

    def __init__(self, engine: AsyncLLMEngine, prompts: Sequence[ProcessedRequest], notify: Callable[[], None]) -> None:
        self.num_reasoning_tokens = 0  # counted by those who read the answers
        self._lives: list[LiveRequest] = []
        try:
            for prompt in prompts:
                self._lives.append(engine.open(prompt, notify))
        except BaseException:
            self.close()
            raise
        samples = (sample for live in self._lives for sample in live.samples)
        self._waiting = dict(enumerate(samples))  # those not taken to their ends, by the number of the choice

    @property
    def states(self) -> list[RequestState]:
        return [live.state for live in self._lives]

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

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of all prompts, and those that came out so far."""
        return sum(s.num_prompt_tokens for s in self.states), sum(s.num_output_tokens for s in self.states)

    @property
    def is_over(self) -> bool:
        """Whether everything has been taken."""
        return not self._waiting

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will come."""
        return all(live.is_settled for live in self._lives)

    def take(self) -> list[CompletionDelta]:
        """Return what is new, `index` being the choice's (prompt by prompt). Steps not looked at are merged.

        Raises:
            ApiError, EngineDeadError: a sample failed or was aborted; the engine is gone.
        """
        news = [delta for number, sample in self._waiting.items() if (delta := sample.take(number)) is not None]
        for delta in news:
            if delta.finish_reason is not None:
                _check_end(delta)
                del self._waiting[delta.index]
        if not news:
            for live in self._lives:
                live.check()
        return news

    def close(self) -> None:
        for live in self._lives:
            live.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def run_to_end(engine: AsyncLLMEngine, prompts: Sequence[ProcessedRequest]) -> tuple[Run, list[CompletionDelta]]:
    """Run requests and return what they give, each choice in one piece.

    Raises:
        ApiError, EngineDeadError: as `Run.take`.
    """
    settled = asyncio.Event()

    def wake_at_the_end() -> None:
        if run.is_settled:
            settled.set()

    with Run(engine, prompts, wake_at_the_end) as run:
        await settled.wait()
        deltas = run.take()
        if not run.is_over:
            run.take()  # raises: the engine is dead
        return run, deltas


def _check_end(delta: CompletionDelta) -> None:
    if delta.finish_reason == "error":
        raise as_api_error(named_error(delta.error_type or RequestError.__name__, delta.error or "The request failed."))
    if delta.finish_reason == "abort":
        raise ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})
