"""A request that runs, in the hands of one reader that wants only what is new."""

from collections.abc import Callable

from octavo.engine.request_state import CompletionState, RequestState
from octavo.errors import OctavoError


class LiveRequest:
    """Made by `AsyncLLMEngine.open`. Told that there is news, take it from each sample; close the request in any case.

    A sample that has nothing new, though it has not ended, may be waiting for an engine that is dead: `check` tells.
    """

    __slots__ = ("_death", "_forget", "state")

    def __init__(
        self, state: RequestState, death: Callable[[], OctavoError | None], forget: Callable[[RequestState], None]
    ) -> None:
        self.state = state
        self._death = death
        self._forget = forget

    @property
    def samples(self) -> list[CompletionState]:
        """In the order of their seeds; see `CompletionState.take`."""
        return self.state.samples

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will come, because all has, or because the engine is dead."""
        return self.state.is_finished or self._death() is not None

    def check(self) -> None:
        """Raise EngineDeadError if the engine ended before the request did."""
        if not self.state.is_finished and (death := self._death()) is not None:
            raise death

    def close(self) -> None:
        """Stop listening; a request that has not ended is aborted. May be called twice."""
        self._forget(self.state)
