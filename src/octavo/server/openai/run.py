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
        self._num_samples = prompts[0].params.n
        self._lives: list[LiveRequest] = []
        self._waiting: dict[int, LiveRequest] = {}  # those that have not been taken to the end, by the prompt's number
        try:
            for prompt in prompts:
                self._lives.append(engine.open(prompt, notify))
        except BaseException:
            self.close()
            raise
        self._waiting.update(enumerate(self._lives))

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

    def take(self) -> list[tuple[int, CompletionDelta]]:
        """Return what is new, with the number of its choice (prompt by prompt). Steps not looked at are merged.

        Raises:
            ApiError, EngineDeadError: a sample failed or was aborted; the engine is gone.
        """
        news: list[tuple[int, CompletionDelta]] = []
        ended = []
        for number, live in self._waiting.items():
            for delta in live.take():
                if delta.finish_reason is not None:
                    _check_end(delta)
                news.append((number * self._num_samples + delta.index, delta))
            if live.is_taken:
                ended.append(number)
        for number in ended:
            del self._waiting[number]
        return news

    def close(self) -> None:
        for live in self._lives:
            live.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def run_to_end(
    engine: AsyncLLMEngine, prompts: Sequence[ProcessedRequest]
) -> tuple[Run, list[tuple[int, CompletionDelta]]]:
    """Run requests and return all that they give, each sample's in one piece or few.

    Raises:
        ApiError, EngineDeadError: as `Run.take`.
    """
    news = asyncio.Event()
    deltas: list[tuple[int, CompletionDelta]] = []
    with Run(engine, prompts, news.set) as run:
        while not run.is_over:
            await news.wait()
            news.clear()
            deltas += run.take()
    return run, deltas


def _check_end(delta: CompletionDelta) -> None:
    if delta.finish_reason == "error":
        raise as_api_error(named_error(delta.error_type or RequestError.__name__, delta.error or "The request failed."))
    if delta.finish_reason == "abort":
        raise ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})
