"""Builds the tokenizers of encoders from what a GGUF file has of them: WordPiece, and SentencePiece's unigrams."""

from collections.abc import Sequence

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram, WordPiece

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # before the first piece of a word; other pieces have nothing before them
_INNER = "##"  # before all but the first, in the tokenizer's own vocabulary


def wordpiece(tokens: Sequence[str], unknown: str) -> Backend:
    """Return BERT's. Files spell tokens in another way, and say nothing of case: llama.cpp lowers all letters."""
    vocabulary = {_own_spelling(token): index for index, token in enumerate(tokens)}
    backend = Backend(WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_INNER)
    return backend


def _own_spelling(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(_SPACE) else _INNER + token


def unigram(tokens: Sequence[str], scores: Sequence[float], unknown_id: int, charsmap: bytes) -> Backend:
    """Return XLM-R's; `charsmap` is SentencePiece's table of how characters are normalized, empty: they are not."""
    backend = Backend(Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown_id))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([*([normalizers.Precompiled(charsmap)] if charsmap else []), spaces])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    return backend


def add_marks(backend: Backend, begin: tuple[str, int], end: tuple[str, int], *, has_kinds: bool) -> None:
    """Put marks around a text, and between two; `has_kinds`: the second text's tokens are of another kind."""
    kind = int(has_kinds)
    (first, _), (last, _) = begin, end
    between = [] if has_kinds else [f"{last}:0"]  # XLM-R has two
    backend.post_processor = processors.TemplateProcessing(
        single=[f"{first}:0", "$A:0", f"{last}:0"],
        pair=[f"{first}:0", "$A:0", f"{last}:0", *between, f"$B:{kind}", f"{last}:{kind}"],
        special_tokens=[begin, end] if begin != end else [begin],
    )
