"""Puts the thoughts of a model before the form of its answer: any tokens between two tags, of limited number.

The two tags must be tokens of their own (in the models that think they are): then a limit is exact, as it counts
tokens, and no text can be mistaken for a tag.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from octavo.errors import InvalidParameterError
from octavo.structured.grammar_text import grammar_text
from octavo.structured_output import StructuredOutput, Thoughts

_GAP = "gap: /[ \\n]{1,8}/"  # white space that models put between thoughts and answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What grammars must know of a tokenizer."""

    num_tokens: int  # without the padding of the model's vocabulary
    special_tokens: Mapping[str, int]  # those that plain text cannot spell, by their text
    end_token_ids: Collection[int]

    def any_but(self, *token_ids: int) -> str:
        """Return the grammar of any one token but these and those that end an answer."""
        ranges, first = [], 0
        for last in sorted({*token_ids, *self.end_token_ids, self.num_tokens}):
            if first < last:
                ranges.append(f"{first}-{last - 1}")
            first = last + 1
        return f"<[{','.join(ranges)}]>"


def whole_grammar(form: StructuredOutput, vocabulary: Vocabulary) -> str:
    """Return the grammar of an answer in `form`, thoughts included; see `grammar_text`.

    Raises:
        InvalidParameterError: a tag of the thoughts is no token of this model.
        ValueError: a grammar in GBNF that does not parse.
    """
    answer = None if form.kind == "thoughts" else grammar_text(form, vocabulary.special_tokens)
    if form.thoughts is not None:
        return _with_thoughts(answer, form.thoughts, vocabulary)
    assert answer is not None
    return answer


def _with_thoughts(answer: str | None, thoughts: Thoughts, vocabulary: Vocabulary) -> str:
    """Return the grammar of thoughts and then `answer`; None: anything. Thoughts not opened yet may stay away."""
    begin = _token("begin", thoughts.begin, vocabulary)
    end = _token("end", thoughts.end, vocabulary)
    thinking = f"{_up_to(thoughts.max_tokens, vocabulary.any_but(end))} <[{end}]>"
    if answer is None:
        at_once = f"({vocabulary.any_but(begin)} any)?"
        start = f"{thinking} any" if thoughts.is_open else f"<[{begin}]> {thinking} any | {at_once}"
        return f"start: {start}\nany: {vocabulary.any_but()}*"
    opening = f"{thinking} gap?" if thoughts.is_open else f"(<[{begin}]> {thinking} gap?)?"
    main = {"name": "main", "lark_grammar": f"start: {opening} @answer\n{_GAP}"}
    return json.dumps({"grammars": [main, *_named(answer)]})


def _up_to(max_count: int | None, item: str) -> str:
    if max_count is None:
        return f"{item}*"
    return f"{item}{{0,{max_count}}}" if max_count else ""


def _token(name: str, tag: str, vocabulary: Vocabulary) -> int:
    if tag not in vocabulary.special_tokens:
        raise InvalidParameterError(f"structured_output.thoughts.{name}", tag, "must be one token of the model's")
    return vocabulary.special_tokens[tag]


def _named(grammar: str) -> list[dict[str, object]]:
    """Return the grammars in `grammar`, the first of them under the name `answer`."""
    if not grammar.startswith("{"):
        return [{"name": "answer", "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [first | {"name": "answer"}, *others]
