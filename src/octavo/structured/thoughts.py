"""Puts the thoughts of a model before the form of its answer: free text between two tokens, of limited length.

The two tags must be tokens of their own (in the models that think they are): then a limit is exact, as it counts
tokens, and no text can be mistaken for a tag.
"""

import json
from collections.abc import Collection, Mapping

from octavo.errors import InvalidParameterError
from octavo.structured_output import Thoughts

_GAP = "gap: /[ \\n]{1,8}/"  # white space that models put between thoughts and answer


def with_thoughts(
    answer: str | None, thoughts: Thoughts, special_tokens: Mapping[str, int], end_token_ids: Collection[int]
) -> str:
    """Return the grammar of thoughts and then `answer`, a grammar in the form of `grammar_text`; None: any text.

    An answer whose thoughts the prompt has not opened may begin at once.

    Raises:
        InvalidParameterError: a tag is no token of this model.
    """
    begin, end = (_token(name, tag, special_tokens) for name, tag in (("begin", thoughts.begin), ("end", thoughts.end)))
    ends = ",".join(str(token_id) for token_id in sorted(end_token_ids))
    count = "*" if thoughts.max_tokens is None else f"{{0,{thoughts.max_tokens}}}"
    thinking = f"<[^{end},{ends}]>{count} <[{end}]>"
    if answer is None:
        start = f"{thinking} any" if thoughts.is_open else f"<[{begin}]> {thinking} any | (<[^{begin},{ends}]> any)?"
        return f"start: {start}\nany: <[^{ends}]>*"
    opening = f"{thinking} gap?" if thoughts.is_open else f"(<[{begin}]> {thinking} gap?)?"
    main = {"name": "main", "lark_grammar": f"start: {opening} @answer\n{_GAP}"}
    return json.dumps({"grammars": [main, *_named(answer)]})


def _token(name: str, tag: str, special_tokens: Mapping[str, int]) -> int:
    if tag not in special_tokens:
        raise InvalidParameterError(f"structured_output.thoughts.{name}", tag, "must be one token of the model's")
    return special_tokens[tag]


def _named(grammar: str) -> list[dict[str, object]]:
    """Return the grammars in `grammar`, the first of them under the name `answer`."""
    if not grammar.startswith("{"):
        return [{"name": "answer", "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [first | {"name": "answer"}, *others]
