"""Incremental detokenization that never emits incomplete characters.

A small state machine: token ids go through a table of bytes, bytes through an incremental UTF-8 decoder. The pieces
concatenate to the result of `Tokenizer.decode`, with one exception: for a run of SentencePiece byte tokens that is not
valid UTF-8, `decode` looks at the whole run, while the stream, which cannot look ahead, emits U+FFFD where
`bytes.decode(errors="replace")` does.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from octavo.tokenizer.byte_table import ByteTable


class HasByteTable(Protocol):
    """The part of a tokenizer that detokenization needs."""

    def byte_table(self, skip_special_tokens: bool) -> ByteTable: ...


class Detokenizer:
    """The text of one sequence of output tokens.

    Some tokenizers drop the leading space of a text. By default the output is a text of its own and loses it, as with
    `decode(output_ids)`; with `prompt_token_ids` it continues the prompt and keeps it.
    """

    __slots__ = ("_awaits_first", "_decoder", "_num_spaces", "_starting", "_table")

    def __init__(
        self, tokenizer: HasByteTable, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._table = tokenizer.byte_table(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._awaits_first = self._table.first_pieces is not self._table.pieces
        self._num_spaces = self._table.num_leading_spaces  # still to be dropped
        self._starting = self._awaits_first or self._num_spaces > 0
        for token_id in prompt_token_ids:
            if not self._starting:
                break
            self.push((token_id,))
        self._decoder.reset()

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text completed by these tokens; empty while a character is incomplete."""
        if self._starting:
            return self._push_start(token_ids)
        pieces = self._table.pieces
        data = pieces[token_ids[0]] if len(token_ids) == 1 else b"".join([pieces[id_] for id_ in token_ids])
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return an incomplete character at the end of the sequence as U+FFFD."""
        self._starting = False
        return self._decoder.decode(b"", True)

    def _push_start(self, token_ids: Sequence[int]) -> str:
        data = b"".join([self._opening_piece(id_) for id_ in token_ids if not self._table.is_silent(id_)])
        text = self._drop_spaces(self._decoder.decode(data))
        self._starting = self._awaits_first or self._num_spaces > 0
        return text

    def _opening_piece(self, token_id: int) -> bytes:
        pieces = self._table.first_pieces if self._awaits_first else self._table.pieces
        self._awaits_first = False
        return pieces[token_id]

    def _drop_spaces(self, text: str) -> str:
        kept = text
        while self._num_spaces and kept.startswith(" "):
            kept = kept[1:]
            self._num_spaces -= 1
        if kept:
            self._num_spaces = 0
        return kept
