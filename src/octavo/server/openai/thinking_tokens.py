"""Counts the tokens that a model thought with, for `usage.completion_tokens_details.reasoning_tokens`."""

from collections.abc import Sequence

from octavo.server.openai.parsers.reasoning import ReasoningParser
from octavo.tokenizer.tokenizer import Tokenizer


class ThinkingTokens:
    """Counts the tokens of one answer up to the tag that ends its thoughts, the tag included."""

    def __init__(self, tokenizer: Tokenizer, parser: ReasoningParser, end: str) -> None:
        self._tokenizer, self._parser = tokenizer, parser
        self._end = end.encode()
        self._tail = b""
        self._num_tokens = 0
        self._has_ended = False

    def push(self, token_ids: Sequence[int]) -> None:
        """Take tokens whose text the parser has got."""
        if self._has_ended or self._parser.has_thoughts is False:
            return
        for token_id in token_ids:
            self._num_tokens += 1
            self._tail += self._tokenizer.token_bytes(token_id)
            if self._end in self._tail:
                self._has_ended = True
                return
            self._tail = self._tail[-len(self._end) :]

    @property
    def num_tokens(self) -> int:
        """How many there are so far; 0 for an answer without thoughts."""
        return self._num_tokens if self._parser.has_thoughts else 0
