"""Where drafts come from: tokens that may follow, guessed for less than a step of the model costs.

A draft never changes what comes out: the model samples every position with that position's own noise, and a draft is
kept only where it equals what was sampled. A good one saves a step, a bad one costs some computing.
"""

from collections.abc import Sequence
from typing import Protocol

from octavo.contracts.schedule import Int32Array


class Drafter(Protocol):
    """Asked by the scheduler, on its thread, before each step in which a request could use drafts.

    One that needs the model's tensors runs in the ranks instead, and proposes with each step's output
    (`ModelRunnerOutput.draft_token_ids`): then the scheduler gets a `RankDrafter`, which hands that on.
    """

    max_num_drafts: int  # of one request in one step; more are cut off

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> Sequence[Sequence[int]]:
        """Return for each request the tokens that may follow its context (prompt and output so far), best guess alone.

        None, for any of them, is an empty sequence. Ids are below the size of the model's vocabulary. The contexts are
        views that hold only during the call.
        """
        ...
