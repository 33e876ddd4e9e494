"""A request that runs, in the hands of one reader that wants only what is new."""

from collections.abc import Callable

from octavo.engine.request_state import CompletionDelta, RequestState
from octavo.errors import OctavoError


class LiveRequest:
    """Made by `AsyncLLMEngine.open`. Wait for its event, clear it, take what there is; close it in any case.

    while not live.is_taken:
        await news.wait()
        news.clear()
        for delta in live.take():
            ...
    """

    __slots__ = ("_death", "_forget", "state")

    def __init__(
        self, state: RequestState, death: Callable[[], OctavoError | None], forget: Callable[[RequestState], None]
    ) -> None:
        self.state = state
        self._death = death
        self._forget = forget

    @property
    def is_taken(self) -> bool:
        """Whether `take` has returned the end of every sample."""
        return all(sample.is_taken for sample in self.state.samples)

    def take(self) -> list[CompletionDelta]:
        """Return what came since the last call; steps that were not looked at are merged.

        Raises:
            EngineDeadError: the engine ended meanwhile.
        """
        if not self.state.is_finished and (death := self._death()) is not None:
            raise death
        return self.state.take()

    def close(self) -> None:
        """Stop listening; a request that has not ended is aborted. May be called twice."""
        self._forget(self.state)
