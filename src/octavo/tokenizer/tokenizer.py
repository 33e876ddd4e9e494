"""`Tokenizer`: text to token ids and back, based on the `tokenizers` library and a checkpoint's files; `ContextLimit`.

`LengthBound` proves that a text is too long without tokenizing it, from the longest token and what the tokenizer does
to text. A token covers a limited number of characters, and of letters, so a text has at least as many tokens as it has
letters divided by the letters of the token with the most. Some tokenizers drop spaces or unknown characters, others
compose characters with the marks that follow; what a tokenizer may do to letters or to all characters decides which of
the two bounds holds. Of kinds of tokenizers that are not listed here, nothing is assumed.
"""

import json
import string
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as Backend
from tokenizers import models

from octavo.errors import InvalidParameterError, PromptTooLongError
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.detokenizer import ByteTable, byte_alphabet, parse_decoder
from octavo.tokenizer.files import TokenizerFiles, read_tokenizer_files

_CHARACTERS_PER_TOKEN = 32  # more than nearly all texts have
_LETTERS = (string.ascii_letters + string.digits).encode()
_LETTER_SET = frozenset(_LETTERS.decode())
_CONTROLS = frozenset({*map(chr, range(0x20)), "\x7f"})
_OTHERS = "other"  # stands for all characters beyond ASCII
_MAX_COMPOSED = 4  # characters of one composed character; Unicode FAQ on normalization, expansion of NFD in UTF-32

_COMPOSING = frozenset({"NFC", "NFKC"})
_KEEPING = frozenset({"NFD", "NFKD", "Lowercase", "ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_DROPPING_SPACES = frozenset({"Strip", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBound:
    """What is known of one tokenizer."""

    max_letters: int | None  # ASCII letters and digits of a token, at most; None: letters may vanish
    max_characters: int | None  # of a token, at most; None: characters may vanish
    lost: bytes = b""  # control characters that vanish all the same
    composes: bool = False  # characters may be composed with the marks that follow

    @classmethod
    def of(cls, backend: Backend) -> Self:
        """Read the stages of a tokenizer; any that is unknown leaves nothing certain."""
        unknown = cls(max_letters=None, max_characters=None)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        lost = _lost(backend, vocabulary)
        if lost is None or not _LETTER_SET.isdisjoint(lost):
            return unknown
        added = backend.get_added_tokens_decoder().values()
        normalizer = backend.normalizer
        texts = [*vocabulary]
        if normalizer is not None:  # these are looked for in normalized text
            texts += [normalizer.normalize_str(token.content) for token in added if token.normalized]
        bound = cls(
            max_letters=max(1, *(_num_letters(text.encode("ascii", "ignore")) for text in texts)),
            max_characters=max(1, *map(len, texts)) if _CONTROLS.issuperset(lost) else None,
            lost="".join(sorted(_CONTROLS & lost)).encode(),
        )
        if any(token.lstrip or token.rstrip for token in added):  # they swallow the spaces around them
            bound = replace(bound, max_characters=None)
        for stage in (normalizer, backend.pre_tokenizer):
            for step in () if stage is None else _steps(json.loads(stage.__getstate__())):
                bound = bound.after(step)
        return bound

    def after(self, step: Mapping[str, Any]) -> Self:
        """Return what is still known behind one step of a normalizer or pre-tokenizer."""
        if step["type"] in _COMPOSING:
            return replace(self, composes=True)
        keeps_letters, keeps_all = _keeps(step)
        return replace(
            self,
            max_letters=self.max_letters if keeps_letters else None,
            max_characters=self.max_characters if keeps_all else None,
        )

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least; 0: nothing is known."""
        least, ascii_ = 0, text.encode("ascii", "ignore")
        if self.max_characters is not None:
            num_kept = len(text) - len(ascii_) + len(ascii_.translate(None, self.lost))
            composed = _MAX_COMPOSED if self.composes and not text.isascii() else 1
            least = -(-num_kept // (self.max_characters * composed))
        if self.max_letters is not None:
            num_letters = _num_letters(ascii_)
            if self.composes:  # a letter that vanishes takes at least one mark with it
                num_letters -= len(text) - len(ascii_)
            least = max(least, -(-num_letters // self.max_letters))
        return least


def _keeps(step: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a step keeps each letter, and whether it keeps each character or makes more of it."""
    kind = step["type"]
    if kind in {"Split", "Punctuation"}:
        return (step["behavior"] != "Removed",) * 2
    if kind == "Prepend":
        return (_is_neutral(step["prepend"]),) * 2
    if kind == "Replace":
        old, new = step["pattern"].get("String", ""), step["content"]
        keeps_letters = bool(old) and _LETTER_SET.isdisjoint(old) and _is_neutral(new)
        return keeps_letters, keeps_letters and len(new) >= len(old)
    return kind in _KEEPING | _DROPPING_SPACES, kind in _KEEPING


def _lost(backend: Backend, vocabulary: Mapping[str, int]) -> Set[str] | None:
    """Return ASCII characters that the model drops, or of which it makes one token of many; and `_OTHERS`, if so.

    None: nothing is known of this kind of model.
    """
    model = backend.model
    if isinstance(model, models.BPE):
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        has_bytes = model.byte_fallback
        if model.unk_token in vocabulary and not model.fuse_unk and not has_bytes:
            return frozenset()
    elif isinstance(model, models.Unigram):
        has_bytes = json.loads(model.__getstate__())["byte_fallback"]
    else:
        return None
    if has_bytes and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return frozenset()
    stages = [json.loads(each.__getstate__()) for each in (backend.normalizer, backend.pre_tokenizer) if each]
    if not any(step["type"] == "ByteLevel" for stage in stages for step in _steps(stage)):
        return frozenset({chr(code) for code in range(128)} - vocabulary.keys() | {_OTHERS})
    missing = {byte for byte, letter in enumerate(byte_alphabet()) if letter not in vocabulary}
    others = {_OTHERS} if missing & {*range(0x80, 0xC0)} else set()  # all others have one of these bytes
    return frozenset({chr(byte) for byte in missing if byte < 0x80} | others)


def _num_letters(text: bytes) -> int:
    return len(text) - len(text.translate(None, _LETTERS))


def _is_neutral(text: str) -> bool:
    """Return whether inserting a text leaves all others as they are: no marks, nothing that a model may drop."""
    return text.isprintable() and not any(map(unicodedata.combining, text))


def _steps(stage: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in stage.get("normalizers") or stage.get("pretokenizers") or ():
        yield from _steps(step)
    if stage["type"] != "Sequence":
        yield stage


class Tokenizer:
    """One checkpoint's tokenizer. Immutable and thread-safe.

    A model's embedding may have more rows than there are tokens (padded vocabularies): ids beyond the tokenizer are
    empty text, never an error.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend, self.files = files.backend, files
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

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text in the tokenizer; None: there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found

    @property
    def bos_token_id(self) -> int | None:
        return self._named_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_token_id("eos_token")

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

    def encode_all(self, texts: Sequence[str], field: str) -> list[list[int]]:
        """Return the ids of each text, without tokens around it: without the GIL, and on several cores."""
        try:
            return [one.ids for one in self._backend.encode_batch(list(texts), add_special_tokens=False)]
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameterError(field, texts, "must be valid Unicode text (no lone surrogates)") from error

    def encode_cut(self, text: str, most: int) -> list[int]:
        """Return the ids of `text` and of the tokens around it, at most so many: what does not fit is cut at its end.

        Raises InvalidParameterError: there is no room for any token of it.
        """
        encoding = self._encoding(self._backend, text)
        room = most - self._backend.num_special_tokens_to_add(is_pair=False)
        if room < 1:
            raise InvalidParameterError("truncate_prompt_tokens", most, f"at least {most - room + 1}")
        encoding.truncate(room)
        ids: list[int] = self._backend.post_process(encoding, None, True).ids
        return ids

    def encode_pair(self, first: str, second: str, most: tuple[int | None, int]) -> tuple[list[int], int]:
        """Return the ids of two texts with the tokens around them, and where those of the second kind begin.

        `most` tokens of the second, and of both with what is around them, are kept.
        """
        of_first, of_second = (self._encoding(self._plain_backend, text) for text in (first, second))
        most_of_second, most_of_all = most
        room = most_of_all - self._backend.num_special_tokens_to_add(is_pair=True) - len(of_first.ids)
        if room < 1:
            raise InvalidParameterError("queries", f"{len(of_first.ids)} tokens", "too long for any document beside it")
        of_second.truncate(room if most_of_second is None else min(room, most_of_second))
        joined = self._backend.post_process(of_first, of_second, True)
        kinds: list[int] = joined.type_ids
        return joined.ids, kinds.index(1) if 1 in kinds else len(kinds)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text that cannot write control tokens: spelled out in it, they are text."""
        ids: list[int] = self._encoding(self._plain_backend, text).ids
        return ids

    @cached_property
    def _plain_backend(self) -> Backend:
        plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _encoding(self, backend: Backend, text: str) -> Any:
        """Return the library's encoding of a text, without tokens around it; without the GIL."""
        try:
            return backend.encode_batch([text], add_special_tokens=False)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameterError("prompt", text, "must be valid Unicode text (no lone surrogates)") from error

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
    def length_bound(self) -> LengthBound:
        """What proves that a text is too long without tokenizing it."""
        return LengthBound.of(self._backend)

    @cached_property
    def _full_table(self) -> ByteTable:
        return ByteTable(self._rules, self._backend.id_to_token)

    @cached_property
    def _spoken_table(self) -> ByteTable:
        return ByteTable(self._rules, self._backend.id_to_token, self.special_token_ids)

    def _named_token_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self.token_id(text)


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Of one model."""

    tokenizer: Tokenizer
    max_model_len: int  # tokens of prompt and output
    has_output: bool = True  # else a place of these is for none, and is not shown

    def check_text(self, text: str) -> None:
        """Refuse a text whose characters prove that it has too many tokens: counting these would take much longer."""
        size = self.max_model_len
        while size <= len(text):  # usually its beginning proves it
            size *= _CHARACTERS_PER_TOKEN
            is_cut = size < len(text)  # its last character could be composed with a mark that follows
            if (least := self.tokenizer.length_bound.min_tokens(text[:size]) - is_cut) >= self.max_model_len:
                raise self.error(f"at least {least} tokens")

    def check(self, num_tokens: int, min_tokens: int) -> None:
        """Check the length of a prompt that is tokenized, and of the least output."""
        if num_tokens + max(1, min_tokens) > self.max_model_len:
            raise self.error(f"{num_tokens} tokens" + (f" + min_tokens {min_tokens}" if min_tokens else ""))

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.max_model_len - 1

    def error(self, wanted: str, field: str = "prompt") -> PromptTooLongError:
        """Return the error of what is too long."""
        limit = f"This model's maximum context length is {self.max_model_len} tokens, prompt and output together"
        if not self.has_output:
            limit = f"This model's maximum context length is {self.max_prompt_tokens} tokens"
        return PromptTooLongError(field, wanted, limit)
