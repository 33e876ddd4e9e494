"""The calibration text: the bundled one or the user's, divided into passages of tokens."""

from importlib.resources import files
from pathlib import Path

from octavo.errors import InvalidParameterError
from octavo.tokenizer.tokenizer import Tokenizer

_BETWEEN = "\n-----\n"  # passages
_MAX_PASSAGE, _MAX_TOKENS, _MIN_TOKENS = 512, 4096, 64


def read_text(path: Path | None) -> str:
    """Return a file's text; None: the bundled one, with prose, chats, code, tables and several languages.

    Raises:
        InvalidParameterError: it cannot be read.
    """
    if path is None:
        return files("octavo.calibration").joinpath("text.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("calibration_text", str(path), f"a UTF-8 text: {error}") from error


def passages_of(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the passages of a text, separated by lines of five hyphens: at most 512 tokens each, 4,096 in total.

    Raises:
        InvalidParameterError: fewer than 64 tokens.
    """
    passages: list[list[int]] = []
    for passage in text.split(_BETWEEN):
        tokens = tokenizer.encode(passage, add_special_tokens=False)
        passages += [tokens[start : start + _MAX_PASSAGE] for start in range(0, len(tokens), _MAX_PASSAGE)]
    while sum(map(len, passages)) > _MAX_TOKENS:
        passages.pop()
    if (count := sum(map(len, passages))) < _MIN_TOKENS:
        raise InvalidParameterError("calibration_text", f"{count} tokens", f"at least {_MIN_TOKENS} tokens")
    return passages
