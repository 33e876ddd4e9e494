"""Complete replies on the wire, and logprobs: rows of objects for chats, four lists for completions."""

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.outputs import Logprob
from octavo.server.openai.timings import Timings
from octavo.tokenizer.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity; used for masked tokens

Table = Mapping[int, Logprob]  # of one position: the chosen token first, then the most likely


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by source."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens by purpose."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. The prompt counts once, however many samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the output."""
        return self.prompt_tokens, self.completion_tokens


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenRow(TopLogprob, frozen=True, kw_only=True):
    """One token of a chat answer; the bytes of all rows concatenate to the text."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One row per token."""

    content: list[TokenRow]
    refusal: None = None


class AnswerFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call by the model."""

    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message. Reasoning is sent under both names that clients look for."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnswerCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists of equal length; the first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one prompt; the samples of the first prompt come first."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"
    system_fingerprint: str | None = None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /detokenize`."""

    prompt: str


class TokenNames:
    """Names of tokens in logprobs; `as_ids`: `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def readable(self, token_id: int) -> str:
        """Return readable text; an incomplete character appears as U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.tokenizer.token_text(token_id)

    def unique(self, token_id: int) -> str:
        """Return unique text, for keys of a map; an incomplete character appears as `bytes:\\xe2\\x80`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatRows:
    """The rows of one chat answer. A row is sent with its text, so text removed by a stop string never appears."""

    def __init__(self, names: TokenNames, num_top: int, *, skips_special_tokens: bool) -> None:
        self._names, self._num_top, self._skips_special_tokens = names, num_top, skips_special_tokens
        self._waiting: deque[tuple[int, TokenRow]] = deque()  # each with the number of bytes before it
        self._num_row_bytes = 0
        self._num_text_bytes = 0

    def push(self, token_ids: Sequence[int], tables: Sequence[Table], text: str) -> list[TokenRow]:
        """Add new tokens and text; return the rows of the text sent so far."""
        for token_id, table in zip(token_ids, tables, strict=True):
            top = [TopLogprob(**self._entry(id_, entry)) for id_, entry in best(table, self._num_top)]
            row = TokenRow(**self._entry(token_id, table[token_id]), top_logprobs=top)
            self._waiting.append((self._num_row_bytes, row))
            if not (self._skips_special_tokens and token_id in self._names.tokenizer.special_token_ids):
                self._num_row_bytes += len(self._names.tokenizer.token_bytes(token_id))
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

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        names = self._names
        data = list(names.tokenizer.token_bytes(token_id))
        return {"token": names.readable(token_id), "logprob": finite(entry.logprob), "bytes": data}


class CompletionRows:
    """The lists of one completion, with an entry for every token, including the one that ended it."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names, self._num_top = names, num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def push(self, token_ids: Sequence[int], tables: Sequence[Table | None]) -> CompletionLogprobs:
        """Return the entries of new tokens."""
        pairs = list(zip(token_ids, tables, strict=True))
        return CompletionLogprobs(
            tokens=[self._names.unique(token_id) for token_id in token_ids],
            token_logprobs=[None if table is None else finite(table[token_id].logprob) for token_id, table in pairs],
            top_logprobs=[None if table is None else self._top(token_id, table) for token_id, table in pairs],
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
        self._num_characters += len(self._decoder.decode(self._names.tokenizer.token_bytes(token_id)))
        return start


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    names = CompletionLogprobs.__struct_fields__
    return CompletionLogprobs(**{name: [entry for part in parts for entry in getattr(part, name)] for name in names})


def prompt_tables(tables: Sequence[Table | None]) -> list[dict[str, object] | None]:
    """Return the `prompt_logprobs` of a reply, by token id, as vLLM's clients read them."""

    def shown(entry: Logprob) -> dict[str, object]:
        return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}

    return [None if table is None else {str(id_): shown(one) for id_, one in table.items()} for table in tables]


def best(table: Table, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` most likely entries, best first."""
    return sorted(table.items(), key=lambda item: item[1].rank)[:count]


def finite(logprob: float) -> float:
    return max(logprob, _LEAST)
