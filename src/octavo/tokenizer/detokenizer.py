"""Incremental detokenization that never emits incomplete characters.

A small state machine: token ids go through a table of bytes, bytes through an incremental UTF-8 decoder. The pieces
concatenate to the result of `Tokenizer.decode`, with one exception: for a run of SentencePiece byte tokens that is not
valid UTF-8, `decode` looks at the whole run, while the stream, which cannot look ahead, emits U+FFFD where
`bytes.decode(errors="replace")` does.

A `tokenizer.json` defines decoding as a chain of decoders. Three families cover the supported checkpoints, and all
three work token by token, except for the leading space that some drop:

- byte-level BPE (GPT-2; Qwen, Llama 3): each character of a token stands for one byte;
- SentencePiece with byte fallback (Llama 1 and 2, Mistral): `▁` is a space, `<0x0A>` is a byte, and the first
  space of the whole text is dropped;
- Metaspace: `▁` is a space, and the first token loses its own.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

from octavo.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderRules:
    """The effect of a chain of decoders on one token."""

    has_alphabet: bool = False  # byte-level BPE: the character at index b of `byte_alphabet` stands for byte b
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    num_leading_spaces: int = 0  # maximum number of spaces dropped at the start of the text
    first_drops: str = ""  # removed from the first token, wherever it occurs
    separator: str = ""  # inserted before every token but the first

    def token_bytes(self, text: str) -> bytes:
        return self.separator.encode() + self._plain_bytes(text)

    def first_token_bytes(self, text: str) -> bytes:
        return self._plain_bytes(text.replace(self.first_drops, "") if self.first_drops else text)

    def _plain_bytes(self, text: str) -> bytes:
        for old, new in self.replacements:
            text = text.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if self.has_alphabet:
            with suppress(UnicodeEncodeError):  # added tokens that are not spelled in the alphabet are literal text
                return codecs.charmap_encode(text, "strict", _encoding_map())[0]
        return text.encode()


class ByteTable:
    """Maps token ids to bytes for one value of `skip_special_tokens`; filled on demand.

    Ids that are not tokens have no bytes: gaps in the vocabulary, or ids beyond its end.
    """

    def __init__(
        self, rules: DecoderRules, text_of: Callable[[int], str | None], skipped_ids: frozenset[int] = frozenset()
    ) -> None:
        """`text_of` returns a token's text in the vocabulary, or None for an id that is not a token."""
        self._text_of, self._skipped_ids = text_of, skipped_ids
        self.num_leading_spaces = rules.num_leading_spaces
        self.pieces: Mapping[int, bytes] = _Pieces(rules.token_bytes, self._spoken_text)
        self.first_pieces = self.pieces  # the same object if the first token is not special
        if rules.first_drops or rules.separator:
            self.first_pieces = _Pieces(rules.first_token_bytes, self._spoken_text)

    def is_silent(self, token_id: int) -> bool:
        """Return whether a token produces no text and so does not count as the first."""
        return self._spoken_text(token_id) is None

    def _spoken_text(self, token_id: int) -> str | None:
        return None if token_id in self._skipped_ids else self._text_of(token_id)


class _Pieces(dict[int, bytes]):
    """Filled on demand: a vocabulary has 150,000 tokens, of which an output uses a few hundred."""

    def __init__(self, bytes_of: Callable[[str], bytes], text_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._bytes_of, self._text_of = bytes_of, text_of

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        piece = self[token_id] = b"" if text is None else self._bytes_of(text)
        return piece


def parse_decoder(spec: Mapping[str, Any] | None) -> DecoderRules:
    """Reduce the `decoder` section of a `tokenizer.json` to per-token rules."""
    if spec is None:
        return DecoderRules(separator=" ")  # the tokenizers library joins token texts with spaces in this case
    if spec.get("type") == "WordPiece":  # of encoders, which write no text: for tokens one by one
        spec = {"type": "Replace", "pattern": {"String": spec["prefix"]}, "content": ""}
    return _add_decoder(DecoderRules(), spec)


def byte_alphabet() -> str:
    """Return GPT-2's byte-level BPE alphabet: printable Latin-1 characters are their own byte, U+0100 on are the rest.

    Source: Radford et al. 2019, section 2.2, and the vocabulary published with it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return "".join(chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(0x100))


@cache
def _encoding_map() -> Any:  # its type is private to codecs
    return codecs.charmap_build(byte_alphabet())


def _add_decoder(rules: DecoderRules, spec: Mapping[str, Any]) -> DecoderRules:
    match spec:
        case {"type": "Sequence", "decoders": list(decoders)}:
            return reduce(_add_decoder, decoders, rules)
        case {"type": "ByteLevel"}:
            return replace(rules, has_alphabet=True)
        case {"type": "ByteFallback" | "Fuse" as kind}:
            return replace(rules, byte_fallback=rules.byte_fallback or kind == "ByteFallback")
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return replace(rules, replacements=(*rules.replacements, (old, new)))
        case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
            return replace(rules, num_leading_spaces=start)
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
            dropped = "" if scheme == "never" else mark
            return replace(rules, replacements=(*rules.replacements, (mark, " ")), first_drops=dropped)
    raise CheckpointError(
        f"tokenizer.json: decoder {spec!r} is not supported; known: ByteLevel, ByteFallback, Fuse, Replace (of a plain "
        "string), Strip (of leading spaces), Metaspace, WordPiece, and sequences of them"
    )


class Detokenizer:
    """The text of one sequence of output tokens.

    Some tokenizers drop the leading space of a text. By default the output is a text of its own and loses it, as with
    `decode(output_ids)`; with `prompt_token_ids` it continues the prompt and keeps it.
    """

    __slots__ = ("_awaits_first", "_decoder", "_num_spaces", "_starting", "_table")

    def __init__(self, table: ByteTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = table
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
        text = ""
        for token_id in token_ids:
            if not self._table.is_silent(token_id):
                pieces = self._table.first_pieces if self._awaits_first else self._table.pieces
                self._awaits_first = False
                text += self._decoder.decode(pieces[token_id])
        while self._num_spaces and text.startswith(" "):
            text = text[1:]
            self._num_spaces -= 1
        if text:
            self._num_spaces = 0
        self._starting = self._awaits_first or self._num_spaces > 0
        return text
