"""The scheduler's stand-in for a drafter that runs in the ranks."""

from collections.abc import Sequence

from octavo.contracts.schedule import DRAWN_IN_RANKS, Int32Array


class RankDrafter:
    """A `Drafter` that proposes placeholders: every rank draws their tokens in the step that verifies them.

    Contexts of `max_len` tokens and more get none: the draft model does not support such positions.
    """

    def __init__(self, max_num_drafts: int, max_len: int) -> None:
        self.max_num_drafts, self.max_len = max_num_drafts, max_len
        self._places = (DRAWN_IN_RANKS,) * max_num_drafts

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[Sequence[int]]:
        # The last draft is verified without having been computed by the draft model.
        return [self._places[: max(0, self.max_len + 1 - len(context))] for context in contexts]

    def forget(self, request_id: str) -> None:
        """No-op: nothing is stored by request."""
