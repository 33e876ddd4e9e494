"""The drafter interface. A drafter guesses the next tokens for less than the cost of a step of the model.

Drafts never change the output: the model samples every position with that position's own noise, and a draft is
accepted only if it equals the sampled token. A good one saves a step, a bad one costs some compute.
"""

from collections.abc import Sequence
from typing import Protocol

from octavo.contracts.schedule import Int32Array


class Drafter(Protocol):
    """Called by the scheduler, on its thread, before each step in which a request could use drafts.

    A drafter that needs tensors runs in the ranks instead, as part of the step that verifies its drafts. The scheduler
    then has a `RankDrafter`, which proposes placeholders, `DRAWN_IN_RANKS`, for the ranks to fill.
    """

    max_num_drafts: int  # per request and step; more are cut off

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> Sequence[Sequence[int]]:
        """Return the single best guess for each request: tokens that may follow its context (prompt and output so far).

        An empty sequence means no drafts. Ids are below the size of the model's vocabulary. The contexts are views that
        are valid only during the call.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is stored of a request: it has ended. Unknown ids are ignored."""
        ...
