"""Matches short texts with the patterns of JSON schemas, in linear time and as the grammar library reads them."""

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, max_lexer_states=16_384, verbose_errors=False)


def fits(pattern: str, text: str) -> bool:
    """Whether `text` matches; not for a pattern that the library does not support."""
    tokenizer = LLTokenizer("byte")
    schema = json.dumps({"type": "string", "pattern": pattern})
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0, limits=_LIMITS)
    token_ids = tokenizer.tokenize_str(json.dumps(text, ensure_ascii=False))
    return not matcher.is_error() and matcher.consume_tokens(token_ids) and matcher.is_accepting()
