"""Patterns of JSON schemas: matched, and rewritten without the look-around that schema generators write.

llguidance has no look-around. Every text that matches a rewritten pattern matches the original one.
"""

import json
import re

_TIME = r"T(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
_PATTERNS = {
    # Zod's e-mail address.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    # Zod's duration.
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(\d+W|\d+Y(\d+M)?(\d+D)?({_TIME})?|\d+M(\d+D)?({_TIME})?|\d+D({_TIME})?|{_TIME})$"
    ),
    # pydantic's decimal.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
}
# pydantic's decimals with max_digits, decimal_places or both.
_BOTH = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)"
    r"\\d\{0,\1\}\\\.\\d\{0,(\d+)\}0\*\$\)"
)
_DIGITS = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)"
)
_PLACES = re.compile(r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$")
_MAX_DIGITS = 64  # alternatives


def without_look_around(pattern: str) -> str:
    """Return a pattern with the same meaning that the library has; others as they are."""
    if pattern in _PATTERNS:
        return _PATTERNS[pattern]
    if both := _BOTH.fullmatch(pattern):
        return _decimal([(int(both[1]), int(both[3]))])
    if (digits := _DIGITS.fullmatch(pattern)) and int(digits[1]) <= _MAX_DIGITS:
        most = int(digits[1])
        return _decimal([(before, most - before) for before in range(most + 1)])
    if places := _PLACES.fullmatch(pattern):
        return rf"^[+-]?(\d+(\.\d{{0,{places[1]}}})?|\.\d{{1,{max(1, int(places[1]))}}})$"
    return pattern


def _decimal(limits: list[tuple[int, int]]) -> str:
    """Return the pattern of numbers with at most so many digits before and after the point, leading zeros aside."""
    forms = ["0+"]
    for before, after in limits:
        if before:
            forms.append(rf"0*\d{{1,{before}}}(\.\d{{0,{after}}})?")
        if after:
            forms.append(rf"0*\.\d{{1,{after}}}")
    return f"^[+-]?({'|'.join(forms)})$"


def matches(pattern: str, text: str) -> bool:
    """Whether `text` matches, in linear time and as llguidance reads patterns; not for one that it does not support."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer = LLTokenizer("byte")
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    limits = LLParserLimits(initial_lexer_fuel=1_000_000, max_lexer_states=16_384, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    token_ids = tokenizer.tokenize_str(json.dumps(text, ensure_ascii=False))
    return not matcher.is_error() and matcher.consume_tokens(token_ids) and matcher.is_accepting()
