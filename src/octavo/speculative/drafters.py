"""Drafters guess the next tokens for less than the cost of a step of the model, which then verifies them.

Drafts never change the output: the model samples every position with that position's own noise, and a draft is
accepted only if it equals the sampled token. A good one saves a step, a bad one costs some compute.
"""

from collections.abc import Sequence
from typing import Protocol

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import DRAWN_IN_RANKS, Int32Array
from octavo.speculative.ngram import NgramDrafter


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


def make_drafter(config: EngineConfig) -> Drafter | None:
    """Return the scheduler's drafter; None without speculative decoding."""
    options = config.speculative
    if options is None:
        return None
    if config.draft_model is not None:
        return RankDrafter(options.num_speculative_tokens, config.draft_model.model.max_model_len)
    return NgramDrafter(options.num_speculative_tokens, options.prompt_lookup_min, options.prompt_lookup_max)
