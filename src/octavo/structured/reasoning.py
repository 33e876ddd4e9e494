"""Prepends reasoning to a constraint: any tokens between two tags, with a limit on their number.

Both tags must be single tokens, as they are in reasoning models. So the limit, which counts tokens, is exact, and no
text can be mistaken for a tag.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from octavo.errors import InvalidParameterError
from octavo.structured.grammar_text import grammar_text
from octavo.structured_output import Reasoning, StructuredOutput

_GAP = "gap: /[ \\n]{1,8}/"  # whitespace that models put between reasoning and answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The part of a tokenizer that grammars need."""

    num_tokens: int  # without padding of the model's vocabulary
    special_tokens: Mapping[str, int]  # those that plain text cannot produce, by text
    end_token_ids: Collection[int]

    def any_but(self, *token_ids: int) -> str:
        """Return the grammar of any single token except these and EOS tokens."""
        ranges, first = [], 0
        for last in sorted({*token_ids, *self.end_token_ids, self.num_tokens}):
            if first < last:
                ranges.append(f"{first}-{last - 1}")
            first = last + 1
        return f"<[{','.join(ranges)}]>"


def whole_grammar(constraint: StructuredOutput, vocabulary: Vocabulary) -> str:
    """Return the grammar of an output in `constraint`, including reasoning; see `grammar_text`.

    Raises:
        InvalidParameterError: a reasoning tag is not a token of this model.
        ValueError: a GBNF grammar that does not parse.
    """
    answer = None if constraint.kind == "reasoning" else grammar_text(constraint, vocabulary.special_tokens)
    if constraint.reasoning is not None:
        return _with_reasoning(answer, constraint.reasoning, vocabulary)
    assert answer is not None
    return answer


def _with_reasoning(answer: str | None, reasoning: Reasoning, vocabulary: Vocabulary) -> str:
    """Return the grammar of reasoning and then `answer` (None: anything). Optional unless already open."""
    begin = _token("begin", reasoning.begin, vocabulary)
    end = _token("end", reasoning.end, vocabulary)
    thinking = f"{_up_to(reasoning.max_tokens, vocabulary.any_but(end))} <[{end}]>"
    if answer is None:
        at_once = f"({vocabulary.any_but(begin)} any)?"
        start = f"{thinking} any" if reasoning.is_open else f"<[{begin}]> {thinking} any | {at_once}"
        return f"start: {start}\nany: {vocabulary.any_but()}*"
    opening = f"{thinking} gap?" if reasoning.is_open else f"(<[{begin}]> {thinking} gap?)?"
    main = {"name": "main", "lark_grammar": f"start: {opening} @answer\n{_GAP}"}
    return json.dumps({"grammars": [main, *_named(answer)]})


def _up_to(max_count: int | None, item: str) -> str:
    if max_count is None:
        return f"{item}*"
    return f"{item}{{0,{max_count}}}" if max_count else ""


def _token(name: str, tag: str, vocabulary: Vocabulary) -> int:
    if tag not in vocabulary.special_tokens:
        raise InvalidParameterError(f"structured_output.reasoning.{name}", tag, "must be a single token of the model")
    return vocabulary.special_tokens[tag]


def _named(grammar: str) -> list[dict[str, object]]:
    """Return the grammars in `grammar`, the first of them renamed to `answer`."""
    if not grammar.startswith("{"):
        return [{"name": "answer", "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [first | {"name": "answer"}, *others]
