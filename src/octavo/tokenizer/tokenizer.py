"""`Tokenizer`: text to token ids and back, based on the `tokenizers` library and a checkpoint's files."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from octavo.errors import InvalidParameterError, PromptTooLongError
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.detokenizer import ByteTable, parse_decoder
from octavo.tokenizer.files import TokenizerFiles, read_tokenizer_files
from octavo.tokenizer.length_bound import LengthBound


class Tokenizer:
    """One checkpoint's tokenizer. Immutable and thread-safe.

    A model's embedding may have more rows than there are tokens (padded vocabularies): ids beyond the tokenizer are
    empty text, never an error.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend, self._files = files.backend, files
        self.named_tokens: Mapping[str, str] = files.named_tokens  # texts of tokens with a role, such as `eos_token`
        decoder, templates = self._backend.decoder, files.chat_templates
        self._rules = parse_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self.chat_template: ChatTemplate | None = None
        if templates:
            default, of_tools = templates.get("default") or next(iter(templates.values())), templates.get("tool_use")
            self.chat_template = ChatTemplate(default, tool_use_source=of_tools, special_tokens=files.named_tokens)

    @classmethod
    def from_path(cls, path: Path | str) -> Self:
        """Read the tokenizer of a checkpoint folder."""
        return cls(read_tokenizer_files(Path(path)))

    def with_chat_template(self, source: str) -> Self:
        """Return a tokenizer with this chat template instead of the checkpoint's."""
        changed = copy(self)
        changed.chat_template = ChatTemplate(source, special_tokens=self.named_tokens)
        changed.chat_template.check()
        return changed

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The ids of all tokens by their text in the tokenizer, including added ones."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def bos_token_id(self) -> int | None:
        return self._named_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_token_id("eos_token")

    def end_token_ids(self, declared: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        return self._files.end_token_ids(declared, vocab_size)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: those that `skip_special_tokens` omits."""
        added = self._backend.get_added_tokens_decoder()
        named = set(self.named_tokens.values())
        return frozenset(id_ for id_, token in added.items() if token.special or token.content in named)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. `tokenizer.json` defines what `add_special_tokens` adds.

        Special tokens spelled out in `text` become their ids in any case.
        """
        try:
            if len(text) > 4096:  # `encode` holds the GIL
                return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameterError("prompt", text, "must be valid Unicode text (no lone surrogates)") from error

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without tokenizing it; 0 if nothing is certain."""
        return self._length_bound.min_tokens(text)

    def encode_all(self, texts: Sequence[str], field: str) -> list[list[int]]:
        """Return the ids of each text, without tokens around it: without the GIL, and on several cores."""
        try:
            return [one.ids for one in self._backend.encode_batch(list(texts), add_special_tokens=False)]
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameterError(field, texts, "must be valid Unicode text (no lone surrogates)") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of all `token_ids`."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of a token within a text; b"" beyond the vocabulary."""
        return self._full_table.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """Return a token's text for display; incomplete characters are U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def byte_table(self, skip_special_tokens: bool) -> ByteTable:
        """Return the table for incremental detokenization."""
        return self._spoken_table if skip_special_tokens else self._full_table

    def render_chat(self, messages: Sequence[Mapping[str, object]], **options: Any) -> str:
        """Return the prompt text of a conversation; see `ChatTemplate.render` for the options."""
        if self.chat_template is None:
            limit = "this model has no chat template; use generate() with a prompt in the model's own format"
            raise InvalidParameterError("messages", f"{len(messages)} messages", limit)
        return self.chat_template.render(messages, **options)

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound.of(self._backend)

    @cached_property
    def _full_table(self) -> ByteTable:
        return ByteTable(self._rules, self._backend.id_to_token)

    @cached_property
    def _spoken_table(self) -> ByteTable:
        return ByteTable(self._rules, self._backend.id_to_token, self.special_token_ids)

    def _named_token_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


_CHARACTERS_PER_TOKEN = 32  # more than nearly all texts have


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Of one model."""

    tokenizer: Tokenizer
    max_model_len: int  # tokens of prompt and output

    def check_text(self, text: str) -> None:
        """Refuse a text whose characters prove that it has too many tokens: counting these would take much longer."""
        size = self.max_model_len
        while size <= len(text):  # usually its beginning proves it
            size *= _CHARACTERS_PER_TOKEN
            is_cut = size < len(text)  # its last character could be composed with a mark that follows
            if (least := self.tokenizer.min_tokens(text[:size]) - is_cut) >= self.max_model_len:
                raise self._error(f"at least {least} tokens")

    def check(self, num_tokens: int, min_tokens: int) -> None:
        """Check the length of a prompt that is tokenized, and of the least output."""
        if num_tokens + max(1, min_tokens) > self.max_model_len:
            raise self._error(f"{num_tokens} tokens" + (f" + min_tokens {min_tokens}" if min_tokens else ""))

    def _error(self, wanted: str) -> PromptTooLongError:
        limit = f"This model's maximum context length is {self.max_model_len} tokens, prompt and output together"
        return PromptTooLongError("prompt", wanted, limit)
