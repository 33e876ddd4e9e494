"""Logprobs in the API's two formats: rows of objects for chats, four lists for completions."""

import codecs
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from octavo.outputs import Logprob
from octavo.server.openai.replies import CompletionLogprobs, TokenRow, TopLogprob
from octavo.tokenizer.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; used for masked tokens

Table = Mapping[int, Logprob]  # of one position: the chosen token first, then the most likely


class TokenNames:
    """Names of tokens in replies."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; joined, the bytes of a text's tokens are the text."""
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._tokenizer.special_token_ids

    def readable(self, token_id: int) -> str:
        """Return readable text; an incomplete character appears as U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def unique(self, token_id: int) -> str:
        """Return unique text, for keys of a map; an incomplete character appears as `bytes:\\xe2\\x80`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatRows:
    """The rows of one chat answer. A row is sent with its text, so text removed by a stop string never appears."""

    def __init__(self, names: TokenNames, num_top: int, *, skips_special_tokens: bool) -> None:
        self._names = names
        self._num_top = num_top
        self._skips_special_tokens = skips_special_tokens
        self._waiting: deque[tuple[int, TokenRow]] = deque()  # each with the number of bytes before it
        self._num_row_bytes = 0
        self._num_text_bytes = 0

    def push(self, token_ids: Sequence[int], tables: Sequence[Table], text: str) -> list[TokenRow]:
        """Add new tokens and text; return the rows of the text sent so far."""
        for token_id, table in zip(token_ids, tables, strict=True):
            self._waiting.append((self._num_row_bytes, self._row(token_id, table)))
            if not (self._skips_special_tokens and self._names.is_special(token_id)):
                self._num_row_bytes += len(self._names.bytes_of(token_id))
        self._num_text_bytes += len(text.encode())
        shown = []
        while self._waiting and self._waiting[0][0] < self._num_text_bytes:
            shown.append(self._waiting.popleft()[1])
        return shown

    def finish(self, *, is_cut: bool) -> list[TokenRow]:
        """Return the remaining rows; none if a stop string or end token cut them off."""
        rest = [] if is_cut else [row for _, row in self._waiting]
        self._waiting.clear()
        return rest

    def _row(self, token_id: int, table: Table) -> TokenRow:
        return TokenRow(
            token=self._names.readable(token_id),
            logprob=finite(table[token_id].logprob),
            bytes=list(self._names.bytes_of(token_id)),
            top_logprobs=[self._top(id_, entry) for id_, entry in best(table, self._num_top)],
        )

    def _top(self, token_id: int, entry: Logprob) -> TopLogprob:
        return TopLogprob(
            token=self._names.readable(token_id),
            logprob=finite(entry.logprob),
            bytes=list(self._names.bytes_of(token_id)),
        )


class CompletionRows:
    """The lists of one completion, with an entry for every token, including the one that ended it."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def push(self, token_ids: Sequence[int], tables: Sequence[Table | None]) -> CompletionLogprobs:
        """Return the entries of new tokens."""
        rated = [
            None if table is None else finite(table[token_id].logprob)
            for token_id, table in zip(token_ids, tables, strict=True)
        ]
        return CompletionLogprobs(
            tokens=[self._names.unique(token_id) for token_id in token_ids],
            token_logprobs=rated,
            top_logprobs=[
                None if table is None else self._top(token_id, table)
                for token_id, table in zip(token_ids, tables, strict=True)
            ],
            text_offset=[self._offset(token_id) for token_id in token_ids],
        )

    def _top(self, token_id: int, table: Table) -> dict[str, float]:
        """Return the most likely tokens, and the chosen one even if it is not among them."""
        entries = {token_id: table[token_id], **dict(best(table, self._num_top))}
        top: dict[str, float] = {}
        for id_, entry in sorted(entries.items(), key=lambda item: item[1].rank):
            top.setdefault(self._names.unique(id_), finite(entry.logprob))
        return top

    def _offset(self, token_id: int) -> int:
        start = self._num_characters
        self._num_characters += len(self._decoder.decode(self._names.bytes_of(token_id)))
        return start


def joined(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """Return several lists, concatenated."""
    whole = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for part in parts:
        whole.tokens.extend(part.tokens)
        whole.token_logprobs.extend(part.token_logprobs)
        whole.top_logprobs.extend(part.top_logprobs)
        whole.text_offset.extend(part.text_offset)
    return whole


def prompt_tables(tables: Sequence[Table | None]) -> list[dict[str, object] | None]:
    """Return the `prompt_logprobs` of a reply, by token id, as vLLM's clients read them."""
    return [None if table is None else {str(id_): _entry(entry) for id_, entry in table.items()} for table in tables]


def best(table: Table, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` most likely entries, best first."""
    return sorted(table.items(), key=lambda item: item[1].rank)[:count]


def finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _entry(entry: Logprob) -> dict[str, object]:
    return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
