"""Builds a tokenizer of the `tokenizers` library from a GGUF file's metadata.

Five kinds are supported: `gpt2`, byte-level BPE with the pre-tokenizer named by `tokenizer.ggml.pre`; `llama`,
SentencePiece BPE with scores; `gemma4`, the same with merges; of encoders `bert`, WordPiece, and `t5`, unigrams. Each
is built like the tokenizer.json of its family.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from octavo.errors import CheckpointError, OctavoError, UnsupportedModelError
from octavo.gguf.file import GgufFile
from octavo.tokenizer.gguf_encoders import add_marks, unigram, wordpiece
from octavo.tokenizer.gguf_patterns import (
    BEGINS_WITH_BOS,
    COMPOSED,
    OTHER_NAMES,
    PATTERNS,
    WHOLE_WORDS_FIRST,
    pre_tokenizer,
)

# enum llama_token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece spells a space
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Special tokens of SentencePiece files that do not name them.
SENTENCEPIECE_IDS = MappingProxyType({"unknown": 0, "bos": 1, "eos": 2})


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raise what the library raises as `CheckpointError`, which begins with `what`: the file, and what is wrong."""
    try:
        yield
    except OctavoError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # pyo3's, in each library
            raise
        raise CheckpointError(f"{what}: {str(error).partition(chr(10))[0]}") from error


def read_gguf_tokenizer(path: Path) -> tuple[Backend, dict[str, str], dict[str, str]]:
    """Return the backend, named tokens (`bos_token`, ...) and chat templates of a file."""
    fields = _Fields(GgufFile.read(path))
    kind = fields.text("model")
    build = _BUILDERS.get(kind)
    if build is None:
        raise fields.unsupported("model", f"known: {', '.join(_BUILDERS)}")
    with library_errors(f"{path}: malformed tokenizer"):
        backend = build(fields)
        _add_special_tokens(backend, fields)
        if kind in _OF_ENCODERS:
            _add_marks(backend, fields, has_kinds=kind == "bert")
        else:
            _add_ends(backend, fields, adds_bos=kind == "llama" or fields.pre in BEGINS_WITH_BOS)
    ids = {field: fields.token_id(name) for name, field in _NAMED.items()}
    named = {field: fields.tokens[index] for field, index in ids.items() if index is not None}
    return backend, named, fields.chat_templates()


def pre_tokenizer_name(backend: Backend) -> str | None:
    """Return the value of `tokenizer.ggml.pre` for a byte-level BPE tokenizer; None: there is none for it."""
    own = json.loads(backend.to_str())
    model = own["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        return None
    is_composed = own["normalizer"] == {"type": "NFC"}
    for name in PATTERNS:
        known = json.loads(pre_tokenizer(name).__getstate__())
        is_same = _split_rules(own["pre_tokenizer"]) == _split_rules(known)
        words_first = name in WHOLE_WORDS_FIRST
        if is_same and is_composed == (name in COMPOSED) and bool(model.get("ignore_merges")) == words_first:
            return name
    return None


def _split_rules(rules: Any) -> Any:
    """Return a pre-tokenizer's JSON without what does not change tokens."""
    if isinstance(rules, dict):
        return {key: _split_rules(value) for key, value in rules.items() if key != "trim_offsets"}
    return [_split_rules(each) for each in rules] if isinstance(rules, list) else rules


class _Fields:
    """The tokenizer's metadata."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self.by_token("token_type", int, [_NORMAL] * len(self.tokens))

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}", default)

    def fail(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: tokenizer.ggml.{key}: {why}")

    def unsupported(self, key: str, why: str) -> UnsupportedModelError:
        said = f"{self._file.path}: tokenizer.ggml.{key}={self.get(key)!r} is not supported; {why}"
        return UnsupportedModelError(f"{said}. --tokenizer can name a folder with the model's tokenizer.json")

    def text(self, key: str) -> str:
        found = self.get(key)
        if not isinstance(found, str):
            raise self.fail(key, f"a name is expected, found {found!r}")
        return found

    @property
    def pre(self) -> str | None:
        """How text is split before BPE, by the first of a kind's names."""
        found = self.get("pre")
        return OTHER_NAMES.get(found, found) if isinstance(found, str) else None

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(line.split(" ")) for line in self._list("merges", str)]
        if any(len(pair) != 2 for pair in pairs):
            raise self.fail("merges", "two tokens with a space between them are expected in each")
        return pairs

    def by_token(self, key: str, kind: type, default: Any = None) -> list[Any]:
        """Return a list with an entry for each token."""
        found = self._list(key, kind, default)
        if len(found) != len(self.tokens):
            raise self.fail(key, f"as many as there are tokens ({len(self.tokens)}) are expected")
        return found

    def token_id(self, name: str) -> int | None:
        """Return the id of a named token; None if the file does not define it."""
        index = self.get(f"{name}_token_id")
        if index is None and self.get("model") == "llama":
            index = SENTENCEPIECE_IDS.get(name)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.fail(f"{name}_token_id", f"an id below {len(self.tokens)} is expected, found {index!r}")
        return index

    def chat_templates(self) -> dict[str, str]:
        names = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
        found = {name: self._file.metadata.get(key) for name, key in names.items()}
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def _list(self, key: str, kind: type, default: Any = None) -> list[Any]:
        found = self.get(key, default)
        if not isinstance(found, list) or not found or not isinstance(found[0], kind):
            raise self.fail(key, f"a list of {kind.__name__} is expected")
        return found


def _byte_level(fields: _Fields) -> Backend:
    name = fields.pre
    if name is None or name not in PATTERNS:
        raise fields.unsupported("pre", "known: " + ", ".join((*PATTERNS, *OTHER_NAMES)))
    vocab = {token: index for index, token in enumerate(fields.tokens)}
    backend = Backend(BPE(vocab, fields.merges(), ignore_merges=name in WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    if name in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE: all pairs of tokens that make a token, those of higher scores first."""
    merges, rank = [], {token: index for index, token in enumerate(tokens)}
    for token, index in rank.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(rank[left], rank[right], left, right) for left, right in pairs if left in rank and right in rank]
        merges += [(scores[index], left, right) for _, _, left, right in sorted(known)]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in merges]


def _sentencepiece(fields: _Fields) -> Backend:
    """BPE whose merges are derived from token scores."""
    return _byte_fallback(fields, merges_by_score(fields.tokens, fields.by_token("scores", float)))


def _gemma4(fields: _Fields) -> Backend:
    """BPE of SentencePiece's kind that has merges: its scores mean nothing."""
    return _byte_fallback(fields, fields.merges())


def _wordpiece(fields: _Fields) -> Backend:
    unknown = fields.token_id("unknown")
    return wordpiece(fields.tokens, "[UNK]" if unknown is None else fields.tokens[unknown])


def _unigram(fields: _Fields) -> Backend:
    charsmap = fields.get("precompiled_charsmap") or []
    scores = fields.by_token("scores", float)
    return unigram(fields.tokens, scores, fields.token_id("unknown") or 0, bytes(each % 256 for each in charsmap))


def _add_marks(backend: Backend, fields: _Fields, *, has_kinds: bool) -> None:
    """Set the tokens around every text, which some files leave to the reader to know."""
    found = []
    for names in (("cls", "bos"), ("seperator", "separator", "eos")):  # the first is how the format spells it
        index = next((each for name in names if (each := fields.token_id(name)) is not None), None)
        if index is None:
            raise fields.fail(f"{names[-1]}_token_id", "the token around every text is expected")
        found.append((fields.tokens[index], index))
    add_marks(backend, *found, has_kinds=has_kinds)


def _byte_fallback(fields: _Fields, merges: list[tuple[str, str]]) -> Backend:
    """BPE over characters; those that are no tokens become tokens of their bytes."""
    vocab = {token: index for index, token in enumerate(fields.tokens)}
    unknown = fields.tokens[fields.token_id("unknown") or 0]
    backend = Backend(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = fields.get("add_space_prefix", fields.get("model") == "llama")
    prepended = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", SPACE)])
    stripped = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    spaces = decoders.Replace(SPACE, " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *stripped])
    return backend


_OF_ENCODERS = ("bert", "t5")
_BUILDERS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "bert": _wordpiece,
    "t5": _unigram,
}


def _add_special_tokens(backend: Backend, fields: _Fields) -> None:
    for index, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True)):
        if kind in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])
        else:
            continue
        if backend.token_to_id(token) != index:
            raise fields.fail("tokens", f"token {index}, {token!r}, is a duplicate")


def _add_ends(backend: Backend, fields: _Fields, *, adds_bos: bool) -> None:
    """Set the tokens added at the start and end of every prompt."""
    # Some files of Gemma 4 say that it has no begin token, against the model's own tokenizer.
    begin = fields.token_id("bos") if fields.get("model") == "gemma4" or fields.get("add_bos_token", adds_bos) else None
    end = fields.token_id("eos") if fields.get("add_eos_token", False) else None
    special = {index: fields.tokens[index] for index in (begin, end) if index is not None}
    if not special:
        return
    template = [
        *([] if begin is None else [f"{special[begin]}:0"]),
        "$A:0",
        *([] if end is None else [f"{special[end]}:0"]),
    ]
    special_tokens = [(text, index) for index, text in special.items()]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)
