"""Drafters guess the next tokens for less than the cost of a step of the model, which then verifies them.

Drafts never change the output: the model samples every position with that position's own noise, and a draft is
accepted only if it equals the sampled token. A good one saves a step, a bad one costs some compute.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import DRAWN_IN_RANKS, Int32Array

_SHORTEST_RUN = 2  # tokens of a run that has a chain
_MAX_CANDIDATES = 24  # earlier occurrences compared per lookup, latest first


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


class NgramDrafter:
    """Prompt lookup: proposes what followed the longest earlier occurrence of a context's end.

    Text that is edited, quoted, summarized or repeated contains its own continuation. Lookup costs microseconds on the
    host and no pass of any model. Source: arXiv:2304.04487, section 3.2.
    """

    def __init__(self, max_num_drafts: int, min_match: int, max_match: int) -> None:
        self.max_num_drafts = max_num_drafts
        self._min_match, self._max_match = min_match, max_match
        self._indices: dict[str, _Occurrences] = {}  # by request id

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[Sequence[int]]:
        return [self._drafts(*request) for request in zip(request_ids, contexts, strict=True)]

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def _drafts(self, request_id: str, context: Int32Array) -> Sequence[int]:
        index = self._indices.get(request_id)
        if index is None:
            index = self._indices[request_id] = _Occurrences(self._min_match)
        start, count = index.longest_match(context.data, self._max_match), self.max_num_drafts
        if start is None:
            return ()
        tokens: list[int] = context[start : start + count].tolist()
        period = len(tokens)
        while len(tokens) < count:  # past the context's end the copy continues periodically
            tokens += tokens[: min(period, count - len(tokens))]
        return tokens


class _Occurrences:
    """Where each run of some tokens has occurred in one growing context, as hash chains (RFC 1951, section 4).

    Of a chain, only the latest end is in the table; each end links to the one before. A token costs one lookup, one
    store and 4 bytes, and an entry per distinct run: less than a suffix automaton in Python, whose longest match it
    finds unless the run has occurred very often. Single tokens do that, so they have no chains: where no run of two
    matches, the token's latest occurrence is as good as any.
    """

    def __init__(self, min_match: int) -> None:
        self._size = max(min_match, _SHORTEST_RUN)
        self._latest: dict[bytes, int] = {}  # run of tokens -> its latest end
        self._before = array("i", [0] * self._size)  # by end: the same run's end before it; 0: none
        self._latest_of_token: dict[int, int] | None = {} if min_match < _SHORTEST_RUN else None
        self._num_indexed = 0  # tokens in it

    def longest_match(self, context: "memoryview[int]", max_match: int) -> int | None:
        """Return the end of the longest earlier match with the context's end, the latest of several; None without any.

        `context` [L] extends the one of the last call. Matches are compared up to `max_match` tokens.
        """
        run_end = self._longest_run(context, max_match) if max_match >= self._size else None
        if run_end is not None or self._latest_of_token is None:
            return run_end
        first, end = self._num_indexed, len(context) - 1
        self._latest_of_token.update(zip(context[first:end], range(first + 1, end + 1), strict=True))
        self._num_indexed = end
        return self._latest_of_token.get(context[end])

    def _longest_run(self, context: "memoryview[int]", max_match: int) -> int | None:
        """Do so among matches of at least the indexed size."""
        length, latest = len(context), self._latest
        for end in range(len(self._before), length):
            run = context[end - self._size : end].tobytes()
            self._before.append(latest.get(run, 0))
            latest[run] = end
        if length <= self._size:
            return None
        best, best_length = None, 0
        end = latest.get(context[length - self._size :].tobytes(), 0)
        for _ in range(_MAX_CANDIDATES):
            if not end or best_length == max_match:
                break
            matched = _num_equal(context, end, self._size, max_match)
            if matched > best_length:
                best, best_length = end, matched
            end = self._before[end]
        return best


def _num_equal(context: "memoryview[int]", end: int, known: int, maximum: int) -> int:
    """Return how many tokens before `end` equal those at the context's end, of which the last `known` do."""
    distance, length = len(context) - end, len(context)
    at = length - 1 - known
    first = max(distance, length - maximum)
    while at >= first and context[at] == context[at - distance]:
        at -= 1
    return length - 1 - at
