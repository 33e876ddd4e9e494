"""A drafter that knows the correct output."""

from collections.abc import Callable, Iterable, Sequence
from typing import Self

from octavo.contracts.schedule import Int32Array


class KnownDrafter:
    """A `Drafter` that knows how requests continue, and proposes right, wrong, half-right or no tokens in turn.

    `continuation` returns the known tokens after a request's context; wrong ones are off by one.
    """

    def __init__(
        self, continuation: Callable[[str, list[int]], Sequence[int]], *, vocab_size: int, max_num_drafts: int = 4
    ) -> None:
        self.max_num_drafts = max_num_drafts
        self.num_proposed = self.num_accepted = 0
        self._num_known: dict[str, int] = {}  # by request id, at its last call
        self._continuation, self._vocab_size = continuation, vocab_size

    @classmethod
    def of_sequences(cls, sequences: Iterable[Sequence[int]], *, vocab_size: int, max_num_drafts: int = 4) -> Self:
        """Use known sequences, prompts included: a context continues like the first sequence that starts with it."""
        known = [list(sequence) for sequence in sequences]

        def continuation(request_id: str, context: list[int]) -> Sequence[int]:
            size = len(context)
            return next((each[size:] for each in known if len(each) > size and each[:size] == context), ())

        return cls(continuation, vocab_size=vocab_size, max_num_drafts=max_num_drafts)

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[list[int]]:
        for request_id, context in zip(request_ids, contexts, strict=True):
            self.num_accepted += len(context) - self._num_known.get(request_id, len(context) - 1) - 1
            self._num_known[request_id] = len(context)
        return [
            self._drafts(request_id, context.tolist())
            for request_id, context in zip(request_ids, contexts, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        self._num_known.pop(request_id, None)

    def _drafts(self, request_id: str, context: list[int]) -> list[int]:
        right = list(self._continuation(request_id, context))[: self.max_num_drafts]
        num_right = (len(right), 0, len(right) // 2, len(right), 1)[len(context) % 5]
        drafts = right[:num_right] + [(token_id + 1) % self._vocab_size for token_id in right[num_right:]]
        self.num_proposed += len(drafts)
        return drafts if len(context) % 7 else []
