"""Constraints as text in llguidance's dialect of Lark, with embedded JSON schemas and the reasoning that comes first.

Source: llguidance's syntax page (`%json`, `<[id]>` for a token, `[lazy]`, `{m,n}`).

Reasoning is any tokens between two tags, with a limit on their number. Both tags must begin with a token, and most are
nothing else: so the limit, which counts tokens, is exact, and no text can be mistaken for a tag.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import InvalidParameterError
from octavo.structured.schema import compiler_schema
from octavo.structured_output import Reasoning, StructuredOutput

_ANY_OBJECT = '{"type":"object"}'
_GAP = "gap: /[ \\n]{1,8}/"  # whitespace that models put between reasoning and answer
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


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
    """Return the grammar of an output in `constraint`, reasoning included.

    InvalidParameterError: a reasoning tag is not a token of this model. ValueError: a GBNF grammar does not parse.
    """
    answer = None if constraint.kind == "reasoning" else grammar_text(constraint, vocabulary.special_tokens)
    opening = " ".join(_pieces(constraint.opening, vocabulary.special_tokens))
    if constraint.reasoning is not None:
        return _with_reasoning(answer, opening, constraint.reasoning, vocabulary)
    assert answer is not None
    return _behind(opening, answer) if opening else answer


def _with_reasoning(answer: str | None, opening: str, reasoning: Reasoning, vocabulary: Vocabulary) -> str:
    """Return the grammar of reasoning and then `answer` (None: anything). Optional unless already open."""
    begin, more_begin = _tag("begin", reasoning.begin, vocabulary)
    end, more_end = _tag("end", reasoning.end, vocabulary)
    count = "*" if reasoning.max_tokens is None else f"{{0,{reasoning.max_tokens}}}"
    thinking = f"{'' if reasoning.max_tokens == 0 else vocabulary.any_but(end) + count} <[{end}]> {more_end}"
    begun = f"<[{begin}]> {more_begin} {thinking}"
    if answer is None:
        start = f"{thinking} any" if reasoning.is_open else f"{begun} any"
        if not reasoning.is_open and not more_begin:
            start += f" | ({vocabulary.any_but(begin)} any)?"
        return f"start: {start}\nany: {vocabulary.any_but()}*"
    gap = "" if more_end else "gap?"
    return _behind(f"{thinking} {gap} {opening}" if reasoning.is_open else f"({begun} {gap})? {opening}", answer)


def _behind(opening: str, answer: str) -> str:
    """Return the grammar of `opening`, an expression, and then `answer`."""
    main = {"name": "main", "lark_grammar": f"start: {opening} @answer\n{_GAP}"}
    if not answer.startswith("{"):
        return json.dumps({"grammars": [main, {"name": "answer", "lark_grammar": answer}]})
    first, *others = json.loads(answer)["grammars"]
    return json.dumps({"grammars": [main, first | {"name": "answer"}, *others]})


def _tag(name: str, tag: str, vocabulary: Vocabulary) -> tuple[int, str]:
    """Return the token that a tag is or begins with, and the expression of the rest."""
    tokens = vocabulary.special_tokens
    first = max((token for token in tokens if tag.startswith(token)), key=len, default=None)
    if first is None:
        field = f"structured_output.reasoning.{name}"
        raise InvalidParameterError(field, tag, "must be a single token of the model, or begin with one")
    return tokens[first], " ".join(_pieces(tag[len(first) :], tokens))


def grammar_text(constraint: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar of `constraint`. `special_tokens` are those that plain text cannot produce, by text."""
    match constraint.kind:
        case "json_schema":
            return schema_grammar(str(constraint.json_schema))
        case "json_object":
            return schema_grammar(_ANY_OBJECT)
        case "regex":
            from llguidance import LLMatcher

            return LLMatcher.grammar_from_regex(constraint.regex or "")
        case "choice":
            return "start: " + " | ".join(map(_quoted, constraint.choice))
        case "grammar":
            return lark_of(constraint.grammar or "")
        case _:
            return _tags(constraint, special_tokens)


def schema_grammar(schema: str) -> str:
    """Return the grammar of the JSON that a schema allows."""
    return json.dumps({"grammars": [{"json_schema": json.loads(compiler_schema(schema))}]})


def lark_of(grammar: str) -> str:
    """Return a grammar in Lark, given Lark or GBNF; ValueError if GBNF does not parse."""
    if _GBNF_RULE.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except Exception as error:  # the converter raises bare Exception with a message
        raise ValueError(str(error)) from error


def _tags(constraint: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar of tags: one rule for all tags with the same trigger, and how many there may be."""
    rules, side_grammars = [], []
    bodies: dict[str, list[str]] = {}  # by trigger
    for index, tag in enumerate(constraint.tags):
        if tag.grammar is not None:
            lark = _with_tokens(lark_of(tag.grammar), tag.tokens, special_tokens)
            side_grammars.append({"name": f"content_{index}", "lark_grammar": lark})
        content = f"@content_{index}" if tag.json_schema is None else f"%json {compiler_schema(str(tag.json_schema))}"
        rest = _pieces(tag.begin[len(tag.trigger or "") :], special_tokens)
        body = " ".join([*rest, content, *_pieces(tag.end, special_tokens)])  # what comes after the trigger
        bodies.setdefault(tag.trigger or "", []).append(body)
    for index, (trigger, endings) in enumerate(bodies.items()):
        pieces = _pieces(trigger, special_tokens)
        if constraint.free_text and pieces[0].startswith('"'):  # text: its first occurrence ends free text
            rules.append(f"head_{index}[lazy]: TEXT {pieces[0]}")
            pieces[0] = f"head_{index}"
        elif constraint.free_text:
            pieces.insert(0, "TEXT")
        rules.append(f"tag_{index}: {' '.join(pieces)} ({' | '.join(endings)})")
    rules.append("tag: " + " | ".join(f"tag_{index}" for index in range(len(bodies))))
    rules.append(r"TEXT: /(.|\n)*/")
    main = "\n".join([f"start: {_repeated(constraint)}", *rules])
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *side_grammars]})


def _with_tokens(lark: str, texts: Sequence[str], special_tokens: Mapping[str, int]) -> str:
    """Return a grammar with the special tokens among `texts` in place of literals of that text.

    A lazy rule is one piece of text, so it cannot hold a token; with a token at its end it need not be lazy.
    """
    found = [text for text in texts if text in special_tokens]
    literal = re.compile("|".join(re.escape(_quoted(text)) for text in found) or r"\Z.")
    lines = lark.split("\n")
    for number, line in enumerate(lines):
        changed = literal.sub(lambda match: f"<[{special_tokens[json.loads(match[0])]}]>", line)
        lines[number] = line if changed == line else changed.replace("[lazy]:", ":", 1)
    return "\n".join(lines)


def _repeated(constraint: StructuredOutput) -> str:
    """Return the repetition of tags and what may come between them."""
    low, high = constraint.min_tags, constraint.max_tags
    if not constraint.free_text:
        separator = _quoted(constraint.separator) if constraint.separator else ""
        more = f"{{{max(low, 1) - 1},{'' if high is None else high - 1}}}"
        some = "tag" if high == 1 else f"tag ({separator} tag){more}"
        return some if low else f"({some})?"
    if high is None:
        return f"tag{{{low},}} TEXT"
    ends = [f"tag{{{high}}}"]  # the output ends with the last allowed tag
    if low < high:
        ends.append(f"tag{{{low},{high - 1}}} TEXT" if high > 1 else "TEXT")
    return " | ".join(ends)


def _pieces(text: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Split text into quoted strings and special tokens."""
    names = sorted((name for name in special_tokens if name in text), key=len, reverse=True)
    if not names:
        return [_quoted(text)] if text else []
    cut = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return [f"<[{special_tokens[part]}]>" if part in special_tokens else _quoted(part) for part in cut if part]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
